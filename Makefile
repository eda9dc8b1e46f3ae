# Every target sets up what it needs in .venv with any Python >= 3.12 that it finds.

VENV ?= .venv
PY := $(VENV)/bin/python
SETUP := VENV=$(VENV) bash .ci/setup
# CUDA's wheels are gigabytes: only where a GPU or the compile check needs them.
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo 1)
EXTRAS := $(if $(GPU),dev cuda13,dev)
WORKERS ?= 2
# Eight processes share the GPU and the host; autotuning the oracle's matrix products would take 15 s a
# test, and the others have no cores for kernels that are compiled ahead.
GPU_ENV := FLASH_PALLAS_COMPILE_AHEAD=0 XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS=--xla_gpu_autotune_level=0

.PHONY: help test test-all test-clients test-compat test-0.12 lint demo compile-check compile-check-0.12 compile-check-hopper compile-check-cuda12 package fuzz-lowering coverage-check test-gpu test-gpus fuzz-check fuzz-gpu coverage-gpu sanitize-gpu bench docs clean

help:
	@echo "make demo           train a small transformer on the standard library's source"
	@echo "make test           lint and the tests that need no GPU, of thorough ones a part"
	@echo "make test-all       all tests that need no GPU, every interpreted kernel among them"
	@echo "make test-compat    flash_pallas.compat against PyTorch on a CPU, which it installs apart"
	@echo "make test-0.12      a part of them with jax 0.12"
	@echo "make compile-check  compile kernels to SASS without a GPU: all for Hopper, a part for others;"
	@echo "                    with PART=n the plain ones of head dims 64 and 128, and a fourth of the rest"
	@echo "make compile-check-0.12  a part of it with jax 0.12"
	@echo "make compile-check-hopper  a part of it with jax 0.12 and jaxlib 0.11, as the extra hopper has them"
	@echo "make compile-check-cuda12  a part of it with the compiler of CUDA 12"
	@echo "make package        wheel and source distribution: built, checked, installed and tried"
	@echo "make fuzz-lowering  random calls lowered without a GPU: COUNT=2000 SEED=1 of each kind"
	@echo "make test-clients   six libraries on flash_pallas, an environment for each; CLIENTS=\"keras\""
	@echo "make test-gpu       the tests that need a Hopper GPU; with PASSED=FILE but for those that the"
	@echo "                    file names, to which it adds those that pass"
	@echo "make test-gpus      the tests that need two or four of them"
	@echo "make fuzz-gpu       random calls of every function against float64: COUNT=1500 SEED=1;"
	@echo "                    with AGAIN=1 only those that make fuzz-check has found"
	@echo "make fuzz-check     which of these have other kernels since; takes them out; needs no GPU"
	@echo "make coverage-gpu   every kernel that a backend can choose, against float64"
	@echo "make coverage-check which kernels have changed since they ran on a GPU; needs none"
	@echo "make sanitize-gpu   every kernel under memcheck and racecheck of compute-sanitizer"
	@echo "make bench          the benchmark tables, on a Hopper GPU"
	@echo "make docs           the site, in build/site; with Chromium installed, a look at every page"
	@echo "In an environment that has everything: make test SETUP=: PY=python3"

test: lint
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not compile"

test-all:
	@$(SETUP) $(EXTRAS)
	FLASH_PALLAS_TESTS=all $(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not compile"

# PyTorch has an environment of its own, with any Python that it is published for.
TORCH_PYTHON ?= python3
test-compat:
	@$(SETUP) $(EXTRAS)
	@test -x $(VENV)-torch/bin/python || $(TORCH_PYTHON) -m venv $(VENV)-torch
	$(VENV)-torch/bin/python -m pip install --quiet --disable-pip-version-check -r .ci/clients/torch.txt
	FLASH_PALLAS_TORCH=$(abspath $(VENV)-torch/bin/python) $(PY) -m pytest -q tests/compat/torch_live.py

lint:
	@$(SETUP) $(EXTRAS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m tests.language
	$(PY) -m pyright --pythonpath $(PY)

demo:
	@$(SETUP) $(if $(GPU),examples cuda13,examples)
	$(PY) examples/train_transformer.py --out-dir demo

compile-check:
	@VENV=$(VENV)-cuda bash .ci/setup compile
	$(VENV)-cuda/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m compile tests/compile_check tests/test_runtime.py
	$(VENV)-cuda/bin/python -m tests.compile_check $(if $(PART),--part $(PART))
	$(VENV)-cuda/bin/python -m tests.compile_check --target a100 --only "64 bfloat16 full" "64 bfloat16 causal" "128 bfloat16 full" "128 bfloat16 causal"
	$(VENV)-cuda/bin/python -m tests.compile_check --target rtx5090 --only "128 bfloat16 causal"
	$(VENV)-cuda/bin/python -m tests.compile_check --target b200 --only "128 bfloat16 causal"

COUNT ?= 200
fuzz-lowering:
	@$(SETUP) dev
	for gpu in hopper portable-163 portable-99; do \
		$(PY) -m tests.lowering_fuzz --gpu $$gpu --count $(COUNT) $(if $(SEED),--seed $(SEED)) || exit 1; \
	done

# A part of it with jax 0.12, whose compiler is another: the loops over masked and whole tiles.
compile-check-0.12:
	@VENV=$(VENV)-0.12 CONSTRAINTS=.ci/constraints-0.12.txt bash .ci/setup compile
	$(VENV)-0.12/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m compile tests/compile_check -k "plans or traded or ahead or why_not or reproduction"
	$(VENV)-0.12/bin/python -m tests.compile_check --only "ward 128 bfloat16 causal" "ward 512 bfloat16 causal"
	$(VENV)-0.12/bin/python -m tests.compile_check --only "ward 256 bfloat16 causal"
	$(VENV)-0.12/bin/python -m tests.compile_check --target a100 --only "128 bfloat16 causal"

# A part of it with the newest jax and jaxlib 0.11, as the extra hopper has them.
compile-check-hopper:
	@VENV=$(VENV)-hopper CONSTRAINTS=.ci/constraints-hopper.txt bash .ci/setup compile
	$(VENV)-hopper/bin/python -m tests.compile_check --only "ward 128 bfloat16 causal"

# A part of it with ptxas 12.9, which the extra cuda12 brings. Rows that spill more than with CUDA 13
# are in docs/limits.md.
compile-check-cuda12:
	@VENV=$(VENV)-cuda12 bash .ci/setup compile-cuda12
	$(VENV)-cuda12/bin/python -m tests.compile_check --only "ward 128 bfloat16 causal" "forward 256 bfloat16 causal"
	$(VENV)-cuda12/bin/python -m tests.compile_check --target a100 --only "128 bfloat16 causal"

package:
	@$(SETUP) $(EXTRAS)
	PYTHON=$(PY) .ci/package

# What depends on the version of jax most, with 0.12: tracing, transformations, Flax, kernels.
ON_0.12 := tests/core tests/test_public_api.py tests/test_dispatch.py tests/test_vjp.py \
	tests/test_transforms.py tests/test_nn.py tests/test_nn_layer.py tests/test_validate.py \
	tests/test_xla.py tests/test_sharding.py tests/test_portable.py tests/test_any_order.py
INTERPRETED_0.12 := tests/test_hopper_interpreted.py tests/test_hopper_decode.py \
	tests/test_portable_interpreted.py tests/test_tangent_kernels.py

test-0.12:
	@VENV=$(VENV)-0.12 CONSTRAINTS=.ci/constraints-0.12.txt bash .ci/setup compile dev
	$(VENV)-0.12/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(ON_0.12)
	$(VENV)-0.12/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(INTERPRETED_0.12) \
		-k "d64 or everything or split_q or alibi or mask_bias or int8"

# Libraries whose attention flash_pallas.integrations takes over, each in $(VENV)-NAME with what
# .ci/clients/NAME.txt pins. FLASH_PALLAS_CLIENTS_JSON=FILE notes what was found.
CLIENTS ?= equinox gemma keras levanter maxtext transformers

test-clients:
	@for client in $(CLIENTS); do VENV=$(VENV)-$$client bash .ci/client $$client || exit 1; done

test-gpu:
	@$(SETUP) dev cuda13
	FLASH_PALLAS_TEST_GPU=1 FLASH_PALLAS_PASSED=$(PASSED) $(GPU_ENV) $(PY) -m pytest tests/test_gpu.py -q -n 8 --dist worksteal -p no:benchmark

# One process: each would take all GPUs.
test-gpus:
	@$(SETUP) dev cuda13
	FLASH_PALLAS_TEST_GPU=several $(GPU_ENV) $(PY) -m pytest tests/test_gpus.py -q -p no:benchmark

coverage-gpu:
	@$(SETUP) dev cuda13
	$(PY) -m flash_pallas.coverage --out benchmarks/results/gpu_coverage.json $(if $(MINUTES),--minutes $(MINUTES))

coverage-check:
	@$(SETUP) dev
	$(PY) -m flash_pallas.coverage --check benchmarks/results/gpu_coverage.json
	$(PY) -m pytest -q tests/test_gpu_results.py

FUZZ = benchmarks/results/gpu_fuzz.json
fuzz-check:
	@$(SETUP) dev
	$(PY) -m tests.gpu_fuzz --check $(FUZZ) --processes $(WORKERS)

fuzz-gpu:
	@$(SETUP) dev cuda13
	$(GPU_ENV) $(PY) -m tests.gpu_fuzz $(if $(AGAIN),--again,--count $(COUNT) $(if $(SEED),--seed $(SEED)) --json) $(FUZZ)

sanitize-gpu:
	@$(SETUP) dev cuda13 sanitizer
	$(GPU_ENV) $(PY) -m tests.sanitize --json benchmarks/results/sanitizer.json

bench:
	@$(SETUP) dev cuda13 bench
	$(PY) -m benchmarks.run --suite h200 --out benchmarks/results/h200.json
	$(PY) -m benchmarks.run_features --processes 8 --out benchmarks/results/features.json
	$(PY) -m benchmarks.run_decode --out benchmarks/results/decode.json

docs:
	@VENV=$(VENV)-docs bash .ci/setup docs
	$(VENV)-docs/bin/python -m mkdocs build --strict --site-dir build/site
	@if command -v chromium >/dev/null; then $(VENV)-docs/bin/python docs/_scripts/screenshots.py build/site; \
		else echo "The pages were not opened: chromium is not installed."; fi

clean:
	rm -rf $(VENV) $(VENV)-cuda $(VENV)-cuda12 $(VENV)-torch $(VENV)-0.12 $(VENV)-hopper $(VENV)-docs build dist demo
