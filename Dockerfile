# syntax=docker/dockerfile:1
# Twostroke on a CPU.
#   docker build --tag twostroke .
#   docker run --rm --publish 127.0.0.1:8000:8000 --volume twostroke:/cache twostroke
#   docker run --rm --volume twostroke:/cache twostroke run smollm2 "Why is the sky blue?"
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# cluster: with a router, for a fleet (deploy/compose.yaml).
ARG EXTRAS=server
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheels/*.whl)[${EXTRAS}]"
RUN useradd --create-home --uid 1000 twostroke && install --directory --owner twostroke --group twostroke /cache
USER 1000
WORKDIR /home/twostroke
ENV TWOSTROKE_CACHE=/cache HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1
VOLUME /cache
EXPOSE 8000
# Healthy once the model is loaded; the first start fetches it. Commands other than `serve` end before it is asked.
HEALTHCHECK --start-period=10m --interval=15s --timeout=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["twostroke"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]
