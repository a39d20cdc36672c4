// Light or dark as Airflow's own page is: its <html> has the class, its choice is kept under "theme".
(() => {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;

  function airflowRoot() {
    try {
      return window.parent === window ? null : window.parent.document.documentElement;
    } catch {
      return null; // framed by somebody else
    }
  }

  function wanted() {
    const outer = airflowRoot();
    if (outer?.classList.contains("dark")) return "dark";
    if (outer?.classList.contains("light")) return "light";
    let chosen = null;
    try {
      chosen = localStorage.getItem("theme");
    } catch {
      // no storage: the system's preference counts
    }
    if (chosen === "dark" || chosen === "light") return chosen;
    return system.matches ? "dark" : "light";
  }

  function follow() {
    if (root.dataset.theme === wanted()) return;
    root.dataset.theme = wanted();
    document.dispatchEvent(new Event("theme"));
  }

  follow();
  const outer = airflowRoot();
  if (outer) new MutationObserver(follow).observe(outer, { attributes: true, attributeFilter: ["class"] });
  window.addEventListener("storage", follow);
  system.addEventListener("change", follow);
})();
