# The chart, the images and their tests.
#
# make chart-test   the chart, with real helm          make chart-docs  bring schema and README up to the code
# make images       both images                        make e2e         the chart's pods as containers, under load

# What builds images (docker or podman), their tag, and what the engine's runs on: cuda or cpu.
BUILDER       ?= docker
TAG           ?= dev
ACCELERATOR   ?= cuda
BUILD_ARGS    ?=
CHART_PYTHON  ?= $(or $(BIN),.venv/bin)/python

.PHONY: chart-test chart-docs images e2e

chart-test: $(or $(VENV),.venv)/.installed-dev
	$(CHART_PYTHON) -m pytest -q tests/chart

chart-docs: $(or $(VENV),.venv)/.installed-dev
	$(CHART_PYTHON) -m tests.chart.settings_schema
	$(CHART_PYTHON) -m tests.chart.values_table

images:
	$(BUILDER) build -f Dockerfile.frontend -t tandem-frontend:$(TAG) $(BUILD_ARGS) .
	$(BUILDER) build -f Dockerfile.engine -t tandem-engine:$(TAG) \
		--build-arg ACCELERATOR=$(ACCELERATOR) --build-arg TORCH_BACKEND=$(if $(filter cpu,$(ACCELERATOR)),cpu,cu130) $(BUILD_ARGS) .

e2e: $(or $(VENV),.venv)/.installed-dev
	TANDEM_E2E=1 $(CHART_PYTHON) -m pytest -v -s tests/e2e $(ARGS)
