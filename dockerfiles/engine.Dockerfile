# The engine: SGLang's own image and our plugin. `ddtree deploy up` builds it; by hand, in a folder that holds
# this file and the wheel:
#   docker build -f engine.Dockerfile --build-arg BASE=lmsysorg/sglang@sha256:... .
# Docker's SDK has no BuildKit: no `RUN --mount`, no heredocs. Nothing here may be a secret: build arguments and
# layers can be read by whoever has the image.
ARG BASE=lmsysorg/sglang:v0.5.23
FROM ${BASE}

# Before everything else, so that what a failed build leaves behind can be told from other images.
LABEL ddtree.image="engine"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
USER 0

# What the base really has decides whether a driver can run it (error 804), whatever its tag says.
ARG CUDA=13.0
RUN found="$(python3 -c 'import torch; print(torch.version.cuda)')" \
    && if [ "${found}" != "${CUDA}" ]; then \
         echo "the base has CUDA ${found}, image.cuda says ${CUDA}: set image.cuda to ${found}" >&2; exit 1; \
       fi

# SGLang needs no root: it reads its own files and writes to its caches. Root stays possible with
# --build-arg SERVICE_USER=0, for a base whose SGLang only root can read; the check below finds that out.
ARG SERVICE_USER=10001
RUN groupadd --gid 10001 ddtree \
    && useradd --no-log-init --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin ddtree \
    && install -d -o ddtree -g ddtree /var/cache/ddtree

# For what is compiled on the host: this card only. Compiled kernels go to one folder, a volume that belongs to
# this image alone: kernels of another version are a known failure.
ENV TORCH_CUDA_ARCH_LIST=12.0a \
    FLASHINFER_CUDA_ARCH_LIST=12.0a \
    XDG_CACHE_HOME=/var/cache/ddtree \
    TRITON_CACHE_DIR=/var/cache/ddtree/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/ddtree/inductor \
    TORCH_EXTENSIONS_DIR=/var/cache/ddtree/extensions \
    FLASHINFER_WORKSPACE_BASE=/var/cache/ddtree \
    SGLANG_CACHE_DIR=/var/cache/ddtree/sglang \
    SGLANG_JIT_CACHE_DIR=/var/cache/ddtree/sglang-jit \
    CUDA_CACHE_PATH=/var/cache/ddtree/cuda \
    PYTHONUNBUFFERED=1

# Nothing but our wheel: what it needs (torch, triton, numpy) is SGLang's, in the versions that SGLang wants.
COPY ddtree-*.whl /opt/ddtree/
RUN PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
       python3 -m pip install --no-cache-dir --no-index --no-deps /opt/ddtree/ddtree-*.whl \
    && rm -r /opt/ddtree

# As the user that serves: the right SGLang, the plugin registered, and all of it readable.
USER ${SERVICE_USER}
WORKDIR /var/cache/ddtree
RUN python3 -m ddtree_engine.sglang_plugin.check

ARG VERSION=unknown
ARG WHEEL_SHA256=unknown
ARG BASE_NAME=unknown
ARG BASE_DIGEST=unknown
LABEL org.opencontainers.image.title="ddtree engine" \
      org.opencontainers.image.description="SGLang with the DDTREE speculative algorithm" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${BASE_NAME}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      ddtree.wheel-sha256="${WHEEL_SHA256}" \
      ddtree.cuda="${CUDA}"

# The API key comes from the environment of the container (DDTREE_API_KEY); all other options are arguments.
ENTRYPOINT ["python3", "-m", "ddtree_engine.sglang_plugin.serve"]
