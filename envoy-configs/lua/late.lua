-- The rule is how long the first byte took, the time at which the pass began, the milliseconds after which its answer is late, its ticket and its id.
local function refused(handle, rule)
  local began, limit, ticket, id = rule:match("^%S+ (%d+) (%d+) (%S+) (%S+)$")
  if not began or handle:timestamp(EnvoyTimestampResolution.MILLISECOND) - tonumber(began) <= tonumber(limit) then
    return false
  end
  local answer = handle:httpCall("tandem-replan", {
    [":method"] = "POST", [":path"] = "/late", [":authority"] = "tandem", ["x-tandem-rule"] = "late",
    ["x-tandem-ticket"] = ticket, ["x-request-id"] = id
  }, "", 2000)
  return answer[":status"] ~= "204"
end
-- begins reports whether a piece has more than comments, which say nothing of the engine.
local function begins(piece)
  return piece:length() > 0 and ("\n" .. piece:getBytes(0, piece:length())):find("[\r\n][^:\r\n]") ~= nil
end
function envoy_on_response(handle)
  local rule = handle:headers():get("x-tandem-rule") -- not to be seen once the headers have gone on
  local kind = handle:headers():get("content-type") or ""
  if kind:find("event-stream", 1, true) then
    for piece in handle:bodyChunks() do
      if begins(piece) then
        if refused(handle, rule) then
          handle:streamInfo():dynamicMetadata():set("tandem.answer", "refused", "true")
        end
        return
      end
    end
    return
  end
  handle:body(true)
  if refused(handle, rule) then
    local headers = handle:headers()
    headers:replace(":status", "503")
    headers:replace("content-type", "application/json")
    headers:replace("retry-after", "1")
    handle:body(true):setBytes('{"error":{"message":"the endpoint stood still until the KV of this prompt may have been freed; try again","type":"api_error","param":null,"code":"kv_outdated"}}')
  end
end
