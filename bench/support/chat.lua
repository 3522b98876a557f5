-- Chat requests, as many bytes as asked for. Every prompt differs from its neighbours from its start, as prompts do,
-- and has line breaks and quotes, which JSON writes with an escape.
-- Arguments after "--": "stream" or "whole", the size of a body in bytes, and how many milliseconds a connection waits
-- before each request; a key, or nothing.
local prepared = {}
local next_one = 0
local WORDS = {"the", "of", "and", "prefill", "decode", "instance", "length", "that", "was", "for", "on", "are", "with",
  "as", "his", "they", "at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were"}
local MOST_BYTES = 64 * 1024 * 1024 -- of all that is prepared

local function text(size)
  local parts, length, line = {}, 0, 0
  while length < size do
    local word = WORDS[math.random(#WORDS)] .. " "
    line = line + #word
    if line > 72 then
      word, line = word .. "\\n", 0
    elseif math.random(60) == 1 then
      word = '\\"' .. word .. '\\" '
    end
    parts[#parts + 1] = word
    length = length + #word
  end
  return table.concat(parts)
end

function init(args)
  local stream = args[1] == "stream" and ',"stream":true' or ""
  local size = tonumber(args[2])
  local pause_ms = tonumber(args[3] or 0)
  if pause_ms > 0 then
    function delay() return pause_ms end
  end
  local count = math.max(8, math.min(1024, math.floor(MOST_BYTES / size)))
  math.randomseed(size)
  local rest = text(size)
  for i = 1, count do
    local prompt = string.format("Request %06d: ", i) .. rest
    local body = '{"model":"m","messages":[{"role":"user","content":"' .. prompt .. '"}],"max_tokens":1' .. stream .. '}'
    local headers = {["Content-Type"] = "application/json"}
    if args[4] and args[4] ~= "" then
      headers["Authorization"] = "Bearer " .. args[4]
    end
    prepared[i] = wrk.format("POST", nil, headers, body)
  end
end

function request()
  next_one = next_one % #prepared + 1
  return prepared[next_one]
end

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    'SUMMARY {"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,' ..
    '"errors":{"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d}}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect, e.read, e.write, e.status, e.timeout))
end
