# make serve   serve a model on this machine      make test   every test        make lint   every check of the code
# make bench   measure the speed     make docs   write the generated tables anew     make format  lay out the code
# make clean   remove what was built, the environment included
# make chaos   engines and frontends killed, frozen, drained, cut off under load (DISTURBANCES=100)
# make conformance   JSON Schemas against the model, with SEEDS=10
# make eval-test   lm-eval itself against the server
#
# Python 3.11 or newer with its venv module, git and a C compiler are all that must be there.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# What `make serve` and `make bench` take: make serve MODEL=Qwen/Qwen3-0.6B FRONTENDS=2 ENGINES=2 PORT=9000
MODEL     ?=
FRONTENDS ?=
ENGINES   ?=
PORT      ?=
EXECUTOR  ?=
TRACE     ?=
ARGS      ?=
# What `make test` takes: make test TESTS=tests/unit ARGS=-x
TESTS     ?= tests
# What `make bench` takes: a running server with the same model, to measure in turns with Tandem's, as in
# make bench PEER=vLLM=http://127.0.0.1:9301
PEER ?=
# What `make chaos` takes.
DISTURBANCES ?= 100
# What `make conformance` takes.
SEEDS ?= 10

SERVE_FLAGS = $(if $(MODEL),--model '$(MODEL)') $(if $(FRONTENDS),--frontends $(FRONTENDS)) \
	$(if $(ENGINES),--engines $(ENGINES)) $(if $(PORT),--port $(PORT)) $(if $(EXECUTOR),--executor $(EXECUTOR)) \
	$(if $(TRACE),--trace $(TRACE)) $(ARGS)

.PHONY: chaos conformance serve test lint format docs bench clean help
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

serve: $(VENV)/.installed-serve
	@$(BIN)/tandem serve $(SERVE_FLAGS)

# One thread for each worker's models: two workers with all cores each would spin against each other.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(TESTS) $(ARGS)

chaos: $(VENV)/.installed-dev
	TANDEM_CHAOS_DISTURBANCES=$(DISTURBANCES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s --timeout 3600 \
		tests/integration/test_chaos_disturbances.py $(ARGS)

conformance: $(VENV)/.installed-dev
	TANDEM_CONFORMANCE_SEEDS=$(SEEDS) $(BIN)/python -m pytest -s tests/integration/test_json_schema_conformance.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-dev
	$(BIN)/python -m docs.generate_configuration
	$(BIN)/python -m docs.generate_scaling
	$(BIN)/python -m docs.generate_dashboard
	$(BIN)/python -m docs.generate_metrics

bench: $(VENV)/.installed-dev
	$(BIN)/python -m loadtest.bench $(if $(PEER),--peer '$(PEER)') $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .schemathesis .import_linter_cache loadtest/results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed anew only when what is to be installed has changed.
$(VENV)/.installed-serve: $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[frontend,engine,launcher]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[frontend,engine,launcher,dev]'
	@touch $@ $(VENV)/.installed-serve

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, and $(PYTHON) is older: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' \
		|| { echo "$(PYTHON) lacks its venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The chart's, the images' and the evaluation's own targets.
-include make/*.mk
