local redirects = {["301"] = true, ["302"] = true, ["303"] = true, ["307"] = true, ["308"] = true}
function envoy_on_response(handle)
  local headers = handle:headers()
  local to = headers:get("location") or ""
  local answer
  if headers:get("x-tandem-ticket") then
    handle:streamInfo():dynamicMetadata():set("tandem", "unfollowed", to:find("^https?://") and "redirect" or "location")
    headers:replace(":status", "503")
    headers:replace("retry-after", "1")
    answer = '{"type":"error","error":{"message":"every way to answer was tried; try again","type":"api_error","param":null,"code":"attempts_exhausted"}}'
  elseif redirects[headers:get(":status")] then -- an engine's own, or of what stands before it
    headers:replace(":status", "502")
    headers:remove("set-cookie")
    answer = '{"type":"error","error":{"message":"the endpoint answered with a redirect, which is not followed","type":"api_error","param":null,"code":"endpoint_redirected"}}'
  else
    return
  end
  headers:remove("location")
  headers:replace("content-type", "application/json")
  local length = handle:body(true):setBytes(answer) -- the headers from before are not to be used behind it
  handle:headers():replace("content-length", length)
end
