# docker build --build-arg TORCH_INDEX=ADDRESS -t hstu_sparse .
# docker run -p 127.0.0.1:8000:8000 -v RUN:/run -v TOKEN:/token hstu_sparse
FROM python:3.12-slim
WORKDIR /app
COPY . .
# The public index has torch only with CUDA: ADDRESS is that of the CPU builds (docs/getting_started.md).
ARG TORCH_INDEX
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '.[cpu,train,serve]' && \
    pip install --no-cache-dir --no-deps torchrec==1.8.0
RUN useradd --uid 1000 serve
USER serve
EXPOSE 8000
ENTRYPOINT ["python", "serve.py"]
CMD ["/run", "--host", "0.0.0.0", "--token-file", "/token"]
