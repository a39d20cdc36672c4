"""What stands below the help of each subcommand: command lines to learn from."""

from __future__ import annotations

#: For each subcommand, command lines and what each is good for.
EXAMPLES: dict[str, dict[str, str]] = {
    "train": {
        "saturn train nightly_retrain gpt2-2x64-lr0.001 --batches 20": "twenty batches of its training",
        "saturn train dags/nightly_retrain.py gpt2-2x64-lr0.001 --technique ddp": "on two devices",
        "saturn train nightly_retrain gpt2-2x64-lr0.001 --pdb": "a debugger where the job's code raises",
    },
    "cluster": {
        "saturn cluster": "all services and two nodes, until Ctrl-C",
        "saturn cluster --set NODE_CONCURRENCY=12": "with room for twelve tasks on each node",
        "saturn cluster --new-secrets docker/.env": "fresh secrets for docker compose, where it has none",
    },
    "demo": {
        "saturn demo": "train eight small models, then stop everything",
        "saturn demo --keep": "leave Airflow and MLflow up to look around",
        "saturn demo --dag my_first_sweep": "the sweep of dags/my_first_sweep.py",
        "saturn demo --cluster": "the same over two nodes, with Celery, Redis and Postgres",
    },
    "devices": {
        "saturn devices": "who holds which GPU, and who waits",
        "saturn devices --announce gpu-a": "let sweeps that name no cluster know these GPUs",
        "saturn devices --announce local --cpu 2": "the same for two CPU slots",
    },
    "doctor": {
        "saturn doctor": "check the deployment that Airflow's configuration describes",
        "saturn doctor --node gpu-a": "check this machine alone, as the node gpu-a",
        "saturn doctor --json": "for a program",
    },
    "drain": {
        "saturn drain gpu-b": "let no new plan use it",
        "saturn drain gpu-b --reason 'new disks'": "and say why",
        "saturn drain": "list the nodes that are drained",
    },
    "undrain": {
        "saturn undrain gpu-b": "let plans use it again",
    },
    "why": {
        "saturn why": "the active sweeps of the deployment, with their expected ends",
        "saturn why nightly_retrain": "when its jobs start and end, and what those that wait are waiting for",
        "saturn why nightly_retrain gpt2-a": "the same for one job",
    },
    "pools": {
        "saturn pools": "a pool for each node, as large as its worker",
        "saturn pools --slots 10": "ten slots where a worker does not answer yet",
    },
    "estimates": {
        "saturn estimates": "all that was measured",
        "saturn estimates 'gpt2-*' --technique fsdp": "how fast some jobs are under one technique",
        "saturn estimates --failed": "what can't run, and why",
    },
    "plan": {
        "saturn plan benchmarks/instances/txt-2x8.json": "a plan, its gap, and why each job got its strategy",
        "saturn plan benchmarks/instances/txt-2x8.json --compare": "against what people do without a planner",
        "saturn plan benchmarks/instances/txt-2x8.json --objective device-time --deadline 90000": "the "
        "cheapest plan that is done in time",
    },
    "restart": {
        "saturn restart nightly_retrain RUN --from-scratch": "train all jobs of a DAG run from the beginning",
        "saturn restart nightly_retrain RUN gpt2-a --go-on": "go on with one, in spite of a change",
    },
    "simulate": {
        "saturn simulate benchmarks/instances/txt-2x8.json": "what rounds gain when estimates are off by 20%",
        "saturn simulate benchmarks/instances/txt-2x8.json --selection halving": "with losing jobs dropped",
        "saturn simulate benchmarks/instances/txt-8-4-4.json --fail-node NODE@0.5": "with a node lost",
        "saturn simulate --arrivals week.json --noise 0.2": "sweeps that arrive at one cluster over days",
    },
    "sweeps": {
        "saturn sweeps": "the latest sweeps",
        "saturn sweeps list --dag nightly_retrain --limit 5": "those of one DAG",
        "saturn sweeps show nightly_retrain": "its latest sweep, job by job",
        "saturn sweeps show nightly_retrain --json": "the same for a program",
    },
}


def below_help(command: str) -> str:
    """The examples of a subcommand as text."""
    examples = EXAMPLES.get(command, {})
    width = max(map(len, examples), default=0)
    if width > 60:
        lines = [f"  {line}\n      {purpose}" for line, purpose in examples.items()]
    else:
        lines = [f"  {line:{width}}  {purpose}" for line, purpose in examples.items()]
    return "\n".join(["examples:", *lines]) if examples else ""
