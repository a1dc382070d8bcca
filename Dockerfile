# Serves the index that is mounted at /index, as a user without rights. To add and remove items, the folder has to be
# writable by user 10001; otherwise append --read-only to the command.
#   docker build -t nearfar .
#   docker run --read-only --tmpfs /tmp --cap-drop ALL -e NEARFAR_TOKEN -p 8000:8000 -v ./my.index:/index nearfar
FROM python:3.11-slim

COPY pyproject.toml constraints.txt README.md LICENSE /source/
COPY src /source/src
COPY recipes /source/recipes
RUN pip install --no-cache-dir --constraint /source/constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu '/source[serve]' \
    && rm -r /source \
    && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin nearfar

USER 10001:10001
ENV HOME=/tmp PYTHONDONTWRITEBYTECODE=1
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/api/v1/health')"]
ENTRYPOINT ["nearfar", "serve", "/index", "--host", "0.0.0.0"]
