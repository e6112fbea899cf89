// The server's HTTP API, as far as this page uses it.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The first model that the server offers. */
export async function modelName(key) {
  const answer = await fetch("v1/models", { headers: headers(key) });
  await check(answer);
  return (await answer.json()).data[0].id;
}

/** Yields the chunks of a streamed chat completion. Throws ApiError, or AbortError once `signal` is aborted. */
export async function* streamChat(body, key, signal) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  await check(answer);
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(answer.status, chunk.error.message);
    yield chunk;
  }
}

/** The data of each server-sent event. An event ends with an empty line; bytes may be cut anywhere. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const event of parts) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function check(answer) {
  if (answer.ok) return;
  const body = await answer.json().catch(() => null);
  throw new ApiError(answer.status, body?.error?.message ?? `The server answered ${answer.status} ${answer.statusText}`);
}
