# The CPU engine, for rehearsals on hosts without a GPU. `ddtree deploy up` builds it when cluster.yaml says
# engine: reference. The context brings all packages, so a build needs no network: wheelhouse/ and installer/
# hold the wheels of local-requirements.txt for Python 3.11 on x86-64.
# Docker's SDK has no BuildKit: no `RUN --mount`, no heredocs; two stages keep the wheels out of the image.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS install

LABEL ddtree.image="local"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Debian's Python brings no pip; a wheel of pip runs without being installed.
COPY installer /installer
COPY wheelhouse /wheelhouse
RUN python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    || { echo "the base needs Python 3.11, for which the wheels are" >&2; exit 1; }
# torch's headers, tests and tools are a quarter of it, and serving needs none of them. All modules are compiled
# here, since the user that serves cannot write beside them.
RUN python3 -m venv --without-pip /opt/ddtree \
    && python3 /installer/pip-*.whl/pip --python /opt/ddtree/bin/python install --no-cache-dir --no-index \
         --no-deps --no-compile /wheelhouse/*.whl \
    && rm -rf /opt/ddtree/lib/python3.11/site-packages/torch/{bin,include,share,test} \
    && python3 -m compileall -q -j 0 /opt/ddtree/lib

COPY ddtree-*.whl /wheel/
RUN python3 /installer/pip-*.whl/pip --python /opt/ddtree/bin/python install --no-cache-dir --no-index \
      --no-deps /wheel/ddtree-*.whl

FROM ${BASE}

LABEL ddtree.image="local"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

RUN groupadd --gid 10001 ddtree \
    && useradd --no-log-init --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin ddtree
COPY --from=install /opt/ddtree /opt/ddtree

ENV PATH=/opt/ddtree/bin:${PATH} \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/ddtree
RUN python -m ddtree_engine.reference --help > /dev/null

ARG VERSION=unknown
ARG WHEEL_SHA256=unknown
ARG BASE_NAME=unknown
ARG BASE_DIGEST=unknown
LABEL org.opencontainers.image.title="ddtree CPU engine" \
      org.opencontainers.image.description="The embedded CPU engine of ddtree, for rehearsals without a GPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${BASE_NAME}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      ddtree.wheel-sha256="${WHEEL_SHA256}"

ENTRYPOINT ["python", "-m", "ddtree_engine.reference"]
