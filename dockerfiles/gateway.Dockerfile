# The gateway smg, one address in front of all replicas of a service. `ddtree deploy up` builds it for the
# `gateways` of cluster.yaml. The context brings everything, so a build needs no network: packages/ is what
# gateway-requirements.txt lists, entry_point.py is ours and hands smg its keys from the environment.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Before everything else, so that what a failed build leaves behind can be told from other images.
LABEL ddtree.image="gateway"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

RUN python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    || { echo "the base needs Python 3.11, for which the packages are" >&2; exit 1; }
RUN groupadd --gid 10001 ddtree \
    && useradd --no-log-init --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin ddtree

COPY packages /opt/ddtree/packages
COPY entry_point.py /opt/ddtree/entry_point.py
ENV PYTHONPATH=/opt/ddtree/packages \
    PYTHONUNBUFFERED=1
# Proves that nothing is missing, and compiles what serving imports.
RUN python3 -c 'import smg.launch_router'

USER 10001
WORKDIR /home/ddtree
RUN python3 /opt/ddtree/entry_point.py --help > /dev/null

ARG BASE_NAME=unknown
ARG BASE_DIGEST=unknown
LABEL org.opencontainers.image.title="ddtree gateway" \
      org.opencontainers.image.description="The gateway smg with its keys from the environment" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_NAME}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"

# The API key comes from the environment of the container (DDTREE_API_KEY); all other options are arguments.
ENTRYPOINT ["python3", "/opt/ddtree/entry_point.py"]
