# The CPU engine, for rehearsals on hosts without a GPU. `ddtree deploy up` builds it when cluster.yaml says
# engine: reference. The context brings everything, so a build needs no network: packages/ is what
# local-requirements.txt lists, installed by pip for Python 3.11 on x86-64, and ddtree/ is our wheel, unpacked.
# Docker's SDK has no BuildKit (no `RUN --mount`): installing from wheels in here would write torch twice.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Before everything else, so that what a failed build leaves behind can be told from other images.
LABEL ddtree.image="local"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

RUN python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    || { echo "the base needs Python 3.11, for which the packages are" >&2; exit 1; }
RUN groupadd --gid 10001 ddtree \
    && useradd --no-log-init --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin ddtree

COPY packages /opt/ddtree/packages
COPY ddtree /opt/ddtree/own
ENV PYTHONPATH=/opt/ddtree/own:/opt/ddtree/packages \
    PYTHONUNBUFFERED=1
# Compiles what serving imports and nothing else: the user that serves cannot write beside the modules.
RUN python3 -c 'import ddtree_engine.reference.launch'

USER 10001
WORKDIR /home/ddtree
RUN python3 -m ddtree_engine.reference --help > /dev/null

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

# The API key comes from the environment of the container (DDTREE_API_KEY); all other options are arguments.
ENTRYPOINT ["python3", "-m", "ddtree_engine.reference"]
