# make demo   optimise, verify and explain a sample model
# make test   lint, types and all tests that need no GPU
# Each makes the virtual environment and builds first. The rest are their parts.

PYTHON ?= python3
ORT ?= $(if $(wildcard .venv/.ready-gpu),gpu,cpu)# which onnxruntime wheel: cpu or gpu; the one installed, if any
JOBS ?= 2

BIN := .venv/bin
READY := .venv/.ready-$(ORT)
EXPORT_READY := .venv/.export-$(ORT)
HEADERS := build/ort-headers
OTHER_WHEEL := $(if $(filter gpu,$(ORT)),onnxruntime,onnxruntime-gpu)# the two share a folder
FLOOR := 1.27.0# the oldest ONNX Runtime supported
GENAI := 0.18.0# the onnxruntime-genai that tests build models with
NATIVE := $(shell git ls-files custom_ops)
PACKAGES := $(shell git ls-files 'ort_moe/*__init__.py' 'rewrites/*__init__.py')# which an editable install knows by name
NATIVE_CXX := $(filter %.cc %.cu %.cuh %.h,$(NATIVE))
DEMO := models/fixtures/mixtral_block_dynamo_fp32.onnx

.PHONY: setup setup-export demo test lint format types unit floor export fixtures docs clean

setup: $(READY)

$(READY): pyproject.toml $(NATIVE) $(PACKAGES) scripts/ort_headers.sh
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	scripts/ort_headers.sh $(HEADERS)
	@echo "installing, and building the library: a minute or two, and up to seven more for CUDA kernels"
	rm -f .venv/.ready-* .venv/.export-*
	$(BIN)/python -m pip uninstall --quiet --quiet --yes $(OTHER_WHEEL)
	$(BIN)/python -m pip install --quiet --editable '.[$(ORT),dev]'
	touch $@

demo: setup
	mkdir -p build/demo
	$(BIN)/ort-moe inspect $(DEMO)
	$(BIN)/ort-moe optimize $(DEMO) -o build/demo/optimized.onnx --force --explain
	$(BIN)/ort-moe verify $(DEMO) build/demo/optimized.onnx

test: setup lint types unit floor

lint: setup
	$(BIN)/ruff format --check --no-cache .
	$(BIN)/ruff check --no-cache .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_CXX)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE_CXX)

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest --quiet -n $(JOBS) -m "not gpu and not export"

# The ops and the rewrites again, on the oldest ONNX Runtime supported.
floor: setup
	test -d build/ort-$(FLOOR) || $(BIN)/python -m pip install --quiet --no-deps --target build/ort-$(FLOOR) onnxruntime==$(FLOOR)
	PYTHONPATH=build/ort-$(FLOOR) $(BIN)/python -m pytest --quiet -n $(JOBS) -m "not gpu and not export" tests/custom_ops tests/rewrites

# Exports models afresh and compares them with the fixtures, takes checkpoints through `ort-moe export`, trains with
# ort_moe.torch, and generates tokens with onnxruntime-genai; needs torch and transformers, so it is not part of `test`.
# onnxruntime-genai lies apart, for it asks for the CPU's onnxruntime.
export: $(EXPORT_READY)
	test -d build/genai-$(GENAI) || $(BIN)/python -m pip install --quiet --no-deps --target build/genai-$(GENAI) onnxruntime-genai==$(GENAI)
	PYTHONPATH=$(CURDIR)/build/genai-$(GENAI) $(BIN)/python -m pytest --quiet -n $(JOBS) --dist loadscope -m "export and not gpu" tests

fixtures: $(EXPORT_READY)
	$(BIN)/python -m models.export

# What `ort-moe export` needs.
setup-export: $(EXPORT_READY)

$(EXPORT_READY): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[$(ORT),dev,export]'
	touch $@

docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python -m models.coverage

clean:
	rm -rf build .venv
