// Requests to the gateway, with the API key if one is needed.

const KEY = "fastserve-api-key";

export const apiKey = {
  // Kept for this tab only, or for this page only if storage is blocked.
  value: readKey(),
  set(key) {
    this.value = key;
    try {
      sessionStorage.setItem(KEY, key);
    } catch {
      // the page still has it
    }
  },
};

function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
  }
}

// Returns the response. Throws ApiError for a refusal, and fetch's error when nothing answers.
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey.value) headers.Authorization = `Bearer ${utf8(apiKey.value)}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (response.ok) return response;
  const text = await response.text();
  let error = { message: `${response.status} ${response.statusText}` };
  try {
    const said = JSON.parse(text).error;
    if (said.message) error = said;
  } catch {
    // a proxy answered, not the gateway
  }
  throw new ApiError(response.status, error);
}

// Headers take characters of one byte. Without this check, fetch would fail on a key that is mistyped
// in another script, as if there were no gateway.
function utf8(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

// Yields the data of each server-sent event, as text. Calls `onBytes` for all that comes, comments
// too. (EventSource could send no key and no body.)
export async function* events(response, onBytes = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onBytes();
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const event = rest.slice(0, end);
        rest = rest.slice(end + 2);
        if (event.startsWith("data: ")) yield event.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}
