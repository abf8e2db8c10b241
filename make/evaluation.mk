# make eval-test   lm-eval against the server (installs it once, in an environment of its own)

.PHONY: eval-test

eval-test: $(or $(VENV),.venv)/.installed-dev
	TANDEM_LM_EVAL=1 OMP_NUM_THREADS=1 $(or $(BIN),.venv/bin)/python -m pytest -v tests/integration/test_lm_eval.py $(ARGS)
