FROM python:3.13-slim AS build
WORKDIR /src
# Layers in the order in which they change: build tools, dependencies (hash-locked), the project itself.
COPY requirements-build.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements-build.lock
COPY requirements.lock ./
RUN python -m venv --without-pip /opt/toolcrib \
    && uv pip install --no-cache --compile-bytecode --python /opt/toolcrib/bin/python --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY app ./app
COPY migrations ./migrations
RUN python -m hatchling build -t wheel -d /dist \
    && uv pip install --no-cache --compile-bytecode --python /opt/toolcrib/bin/python --no-deps --no-index /dist/*.whl

FROM python:3.13-slim
# bubblewrap is what the kernel sandbox starts commands with; ripgrep came with the wheels. What commands need beyond
# a shell (git, compilers) belongs into an image that is built FROM this one.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home app \
    && install -d -o app -g app -m 0700 /data
COPY --from=build /opt/toolcrib /opt/toolcrib
ENV PATH=/opt/toolcrib/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TOOLCRIB_HOST=0.0.0.0 \
    TOOLCRIB_PORT=8080 \
    TOOLCRIB_DATA_DIR=/data
# Not root, so this user owns every workspace and runs every command; TOOLCRIB_RUN_AS is for images that start as root.
USER app
WORKDIR /home/app
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['TOOLCRIB_PORT'] + '/healthz', timeout=2)"]
# An init as PID 1 passes signals on and reaps what no one waits for.
ENTRYPOINT ["tini", "--", "toolcrib"]
CMD ["serve"]
