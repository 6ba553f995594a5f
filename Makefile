PYTHON ?= python3
BIN := .venv/bin
# Two stages: what running needs (PyTorch and the base), and what developing and testing need.
RUN := .venv/.installed-run$(if $(CPU),-cpu)
DEV := .venv/.installed-dev
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# `CPU=1` takes PyTorch's CPU build, from PyTorch's own index: about 0.2 GB to fetch, not 3 GB of CUDA libraries.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
EVERYTHING := .[torch,jax,serve,clients,dev]
ifdef CPU
TORCH_PACKAGE := --extra-index-url $(CPU_INDEX) torch==$(TORCH)+cpu
else
TORCH_PACKAGE := torch==$(TORCH)
endif

# Compiled Python is kept: without it each process of the tests compiles the package, and each run the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick lint docs install clean

demo: $(RUN)
	$(BIN)/fullstride meanflow demo $(if $(EPOCHS),--epochs $(EPOCHS))

# Each process takes one half in its order, so that what a file's tests share is made once, and in the end of the other's.
# Without a GPU's device file its tests, which would all be skipped, are not collected either.
test: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(if $(wildcard /dev/nvidia0),,--ignore=tests/gpu)

# What is slow and of a kind that `make test` has a quick member of: sweeps over networks, real weights, package resolvers.
.PHONY: test-thorough
test-thorough: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m thorough

# The fastest tests of every room, for daily work: under three minutes on two cores.
QUICK := $(wildcard tests/test_[elr]*.py) $(addprefix tests/, \
  assets runs process measure device cli/test_help.py launch/test_words.py launch/test_processes.py launch/test_attempts.py \
  jvp/test_dual.py jvp/test_dual_op.py jvp/checking jvp/norms/test_naive.py jvp/attention/test_naive.py \
  step/torch/test_batches.py step/torch/test_body.py step/torch/ema step/torch/transfer step/torch/distributed/test_join.py \
  step/torch/runners/test_expected_shapes.py step/jax/test_loss.py step/jax/trees \
  meanflow/config meanflow/checkpoints meanflow/models/test_dit.py meanflow/objective/test_times.py \
  meanflow/objective/test_weighting.py meanflow/objective/test_loss.py meanflow/data meanflow/metrics \
  meanflow/sampling/test_noise.py meanflow/sampling/test_files.py meanflow/sampling/test_grids.py \
  meanflow/evaluation/test_scoring.py meanflow/training/test_guard.py meanflow/training/test_reporter.py \
  meanflow/planning/test_plan.py bert/model bert/data bert/training/test_settings.py bert/training/test_reporter.py \
  $(addprefix llm/test_, prompts.py sampling_params.py vllm_names.py) llm/text llm/weights llm/kernels/test_emulation.py \
  llm/engine/test_blocks.py llm/engine/test_pool.py llm/server/test_schemas.py llm/server/tools pages/test_pages.py \
  benchmarks/harness benchmarks/cli benchmarks/tuning benchmarks/report/test_staleness.py benchmarks/report/test_frame.py \
  benchmarks/cases/jvp/test_table.py benchmarks/cases/jvp/test_common.py benchmarks/cases/meanflow/test_step_table.py)
SLOW := $(addprefix tests/, \
  device/test_memory.py device/test_launch_replay.py device/test_precision.py process/test_watchdog.py test_extras.py \
  bert/data/test_sources.py meanflow/data/test_reading.py meanflow/metrics/test_classifier.py \
  llm/text/test_chat_template.py llm/weights/test_smollm2.py benchmarks/harness/test_stop_requests.py)
quick: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK) $(addprefix --ignore=,$(SLOW))

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The pages as a site, strictly: a link that leads nowhere fails, and so does a table that is not that of the results.
docs: $(DEV)
	$(BIN)/python -m benchmarks report tables --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

install: $(DEV)

# pip is silent while it unpacks gigabytes: a line every 20 s says that it is still at work.
define pip_install
@echo "$(1)"
@( while sleep 20 >/dev/null 2>&1; do echo "  still installing; .venv has $$(du -sh .venv | cut -f1)"; done ) & \
  trap "kill $$!" EXIT; trap "exit 130" INT TERM; \
  $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(2)
endef

# torch goes first and through the constraints: an unpinned torch takes whichever build is newest.
$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "fullstride needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || { echo "Making a virtual environment in .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	$(call pip_install,Installing PyTorch $(TORCH)$(if $(CPU), (CPU build: 0.2 GB to fetch), (with CUDA: 3 GB to fetch; make CPU=1 takes the CPU build)),$(TORCH_PACKAGE))
	$(call pip_install,Installing fullstride and what MeanFlow needs,--quiet -e '.[torch]')
	@touch $@

$(DEV): $(RUN)
	$(call pip_install,Installing what JAX and the tests need,--quiet -e '$(EVERYTHING)')
	@touch $@

# What would be uploaded, in dist/; docs/reference/versions.md says what else a release needs.
.PHONY: release-check
release-check: $(DEV)
	$(BIN)/python -m tests.packaging.release

clean:
	rm -rf .venv runs site
