# finetune on NVIDIA GPUs: docker build -f docker/gpu.Dockerfile -t finetune:gpu .
# A `devel` image, because DeepSpeed compiles its native ops with CUDA's compiler.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

# Not pinned: security updates of the base are wanted.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends g++ libaio-dev python3 python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

COPY constraints.txt /tmp/constraints.txt
ARG TORCH_PIP_ARGS=""
# The build of DeepSpeed imports setuptools and torch from here; its ops are compiled when a run needs them.
# hadolint ignore=SC2086
RUN pip install --no-cache-dir -c /tmp/constraints.txt setuptools wheel hatchling && \
    pip install --no-cache-dir -c /tmp/constraints.txt ${TORCH_PIP_ARGS} torch
RUN DS_BUILD_OPS=0 pip install --no-cache-dir --no-build-isolation -c /tmp/constraints.txt deepspeed

COPY . /opt/finetune
RUN pip install --no-cache-dir --no-build-isolation -c /tmp/constraints.txt "/opt/finetune[report,serve]"

# Runs, caches and compiled ops: mount a volume here.
WORKDIR /project
ENV HF_HOME=/project/.cache/huggingface TORCH_EXTENSIONS_DIR=/project/.cache/torch_extensions
ENTRYPOINT ["finetune"]
CMD ["--help"]
