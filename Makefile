PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint docs install clean

demo: $(INSTALLED)
	$(BIN)/fullstride meanflow demo $(if $(EPOCHS),--epochs $(EPOCHS))

# Each process takes one half in its order, so that what a file's tests share is made once, and in the end of the other's.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The pages as a site, strictly: a link that leads nowhere fails.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

install: $(INSTALLED)

# torch goes first and through the constraints: an unpinned torch takes whichever build is newest.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "fullstride needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,jax,serve,dev]'
	touch $@

# What would be uploaded, in dist/; docs/versions.md says what else a release needs.
.PHONY: release-check
release-check: $(INSTALLED)
	$(BIN)/python -m tests.packaging.release

clean:
	rm -rf .venv runs site
