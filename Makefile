# make install | demo | cluster | cluster-demo | test | test-nightly | test-families | test-cuda | test-fast | coverage | lint | lines | docs | clean
PYTHON ?= python3
# Parts of the tests at a time.
LANES ?= 3
STATE ?= .saturn
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PARTS := test-strategies test-integration test-others test-training test-airflow test-plugin

.PHONY: lines install demo cluster cluster-demo what-cluster-needs test what-tests-need $(PARTS) test-nightly test-families test-cuda test-emulated-gpu test-fast coverage lint docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
		--editable ".[cluster,dev,docs,torch,transformers]" apache-airflow==3.3.2 torch==2.13.0
	# On all cores, where pip uses one; what is here, too, for who has Python write no bytecode. Some packages
	# hold files that are templates or for other Pythons, which do not compile.
	$(BIN)/python -m compileall -qq -j 0 -x /tests/ $(VENV)/lib saturn_airflow techniques || true
	# The planner compiles its innermost loops once per machine: now, rather than in the first plan.
	$(BIN)/python -c "from saturn_airflow.planning.warming import warm; warm()"
	touch $@

# The nightly DAG on this machine, start to end. KEEP=1 leaves the UIs up until Ctrl-C.
demo: install
	$(BIN)/saturn demo --state $(STATE) $(if $(KEEP),--keep)

# Postgres, Redis, MLflow, Airflow and two nodes, as docker/compose.yaml says, until Ctrl-C.
cluster: what-cluster-needs install
	$(BIN)/saturn cluster --state $(STATE)-cluster

# A sweep over the two nodes of that cluster, start to end.
cluster-demo: what-cluster-needs install
	$(BIN)/saturn demo --cluster --state $(STATE)-cluster $(if $(KEEP),--keep)

# Said before the installation, which takes minutes.
what-cluster-needs:
	@missing="$$(.ci/missing | tr ' ' '\n' | grep -v chromium | xargs)"; test -z "$$missing" || \
		{ echo "The cluster needs $$missing: on Debian and Ubuntu, sudo apt-get install $$missing"; exit 1; }

# Parts, LANES at a time: more than there are cores, since tests wait for services. Each shows its results at its end.
# What brings up services of its own is a part of its own, so that they don't run on beside all later tests.
# The longest come first, since the last to end leaves a core idle.
# JUNIT=FOLDER: and writes them there, for benchmarks/suite.py. ALSO=lint: and that target, beside the last of the tests:
# mypy without its cache takes minutes of one core.
STRATEGIES := tests/techniques tests/guard tests/data
test: what-tests-need install
	$(MAKE) --no-print-directory --jobs=$(LANES) --keep-going --output-sync=target $(PARTS) $(ALSO)

what-tests-need:
	@missing="$$(.ci/missing)"; test -z "$$missing" || \
		{ echo "The tests need $$missing: on Debian and Ubuntu, sudo apt-get install $$missing"; exit 1; }

FOLDERS := tests/integration tests/training tests/airflow tests/plugin
test-integration test-training test-airflow test-plugin: TESTS = tests/$(@:test-%=%)
test-strategies: TESTS := $(STRATEGIES)
test-others: TESTS := tests $(patsubst %,--ignore=%,$(FOLDERS) $(STRATEGIES))
$(PARTS): install
	$(BIN)/python -m pytest -m "not nightly" $(TESTS) $(if $(JUNIT),--junit-xml=$(JUNIT)/$@.xml)

# What `make test` leaves out: the rest of the products of models and techniques, and sweeps of several nights.
test-nightly: what-tests-need install
	$(BIN)/python -m pytest -m nightly

# Every model family under every technique next to a plain loop: about an hour of two cores. Writes docs/families.md.
# A run that was ended goes on where it stopped, as long as the code is that of the same commit.
test-families: install
	PYTHONPATH=tests $(BIN)/python -m families --jobs 2 --write --results $(STATE)/families-$$(git rev-parse --short HEAD).jsonl

# On a machine with GPUs; a machine without skips them. Other files would be imported, which need Airflow.
CUDA_TESTS = $(shell grep -rl 'pytest\.mark\.cuda' tests --include='test_*.py')
test-cuda: install
	$(BIN)/python -m pytest -m cuda $(CUDA_TESTS)

# The same on two emulated GPUs, on a machine with g++ and none: but what is about races, drivers and other processes.
test-emulated-gpu: install
	$(BIN)/python tests/emulated_gpu 2 $(BIN)/python -m pytest -m cuda -k "not no_race and not a_race and not another_process and not doctor" $(CUDA_TESTS)

# No Airflow services, no ranks, and nothing that takes more than a moment: about a minute of two cores.
test-fast: install
	$(BIN)/python -m pytest -n auto -m "not services and not ranks and not slow and not nightly"

# Which lines of the package the tests without services and ranks run. Not in `make test`: on Python 3.11 tracing costs a third of the CPU time, and
# what runs in ranks and services of their own is not seen.
coverage: install
	$(BIN)/python -m pytest -n auto -m "not services and not ranks" --cov saturn_airflow --cov-report term:skip-covered

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# How much code there is, and which files and functions are above the limits.
lines:
	@$(PYTHON) .ci/lines

# The documentation as a site in site/; a link that leads nowhere is an error.
docs: install
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(STATE) $(STATE)-cluster site
