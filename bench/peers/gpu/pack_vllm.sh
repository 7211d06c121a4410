#!/usr/bin/env bash
# Packs vLLM 0.26.0 (the last release for torch 2.11) for a machine without a network: Python 3.12, torch 2.11+cu130,
# transformers, aiohttp and the like already there. Leaves PARTS files of under 60 MiB in OUT_DIR.
#   pack_vllm.sh OUT_DIR
# On the machine: cat the parts in order | xz -d -T0 | tar xf - -C DIR, then make bench-gpu VLLM=DIR.
set -euo pipefail
out=$1; work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/pack"
tags=(--python-version 3.12 --only-binary=:all: --platform any)
for p in manylinux_2_35 manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do tags+=(--platform "${p}_x86_64"); done
pip download -q --no-deps "${tags[@]}" -d "$work" vllm==0.26.0
unzip -q "$work"/vllm-0.26.0*.whl -d "$work/pack"
pip install -q --no-deps --target "$work/pack" "${tags[@]}" cachetools blake3 pydantic==2.12.5 pydantic-core==2.41.5 \
  annotated-types typing-inspection 'fastapi>=0.133,<0.137' 'starlette>=1.0.1' 'openai<3' 'anthropic<1' 'mcp<2' distro jiter sniffio \
  prometheus-fastapi-instrumentator lm-format-enforcer==0.11.3 interegular 'llguidance<1.8.0,>=1.7.0' outlines_core==0.2.14 \
  lark==1.2.2 xgrammar==0.2.1 partial-json-parser jsonschema jsonschema-specifications referencing rpds-py pyzmq msgspec \
  mistral_common pydantic-extra-types pycountry compressed-tensors==0.17.0 loguru depyf==0.20.0 astor dill watchfiles \
  python-json-logger pybase64 cbor2 ijson setproctitle openai-harmony docstring-parser model-hosting-container-standards \
  supervisor jmespath httpx-sse pydantic-settings python-dotenv sse-starlette python-multipart uvicorn httptools websockets \
  opentelemetry-sdk opentelemetry-api opentelemetry-exporter-otlp opentelemetry-exporter-otlp-proto-common \
  opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-otlp-proto-grpc opentelemetry-proto \
  opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai googleapis-common-protos importlib-metadata \
  email-validator dnspython fastapi-cli rich-toolkit diskcache gguf pyjwt nvtx apache-tvm-ffi==0.1.10 flashinfer-python==0.6.14
cd "$work/pack"
rm -rf vllm/third_party/fmha_sm100 vllm/third_party/deep_gemm/include vllm/vllm-rs vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so \
  flashinfer/data mistral_common/data/*.json pycountry/locales
find . -name __pycache__ -type d -exec rm -rf {} +
strip -g xgrammar/*.so || true
tar cf - . | xz -T0 -2 | split -d -a 1 -b 58M - "$work/part."
mv "$work"/part.* "$out"/
ls -la "$out"
