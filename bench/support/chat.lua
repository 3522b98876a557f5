-- Chat requests of about 480 bytes. Every prompt differs from its neighbours, as prompts do.
-- Arguments after "--": "stream" or "whole".
local prepared = {}
local next_one = 0

function init(args)
  local stream = args[1] == "stream" and ',"stream":true' or ""
  for i = 1, 1024 do
    local text = string.format("Request %06d: ", i) .. string.rep("hello world ", 31)
    local body = '{"model":"m","messages":[{"role":"user","content":"' .. text .. '"}],"max_tokens":1' .. stream .. '}'
    prepared[i] = wrk.format("POST", nil, {["Content-Type"] = "application/json"}, body)
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
