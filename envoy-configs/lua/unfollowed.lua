function envoy_on_response(handle)
  local headers = handle:headers()
  if not headers:get("x-tandem-ticket") then
    return -- an engine's own redirect
  end
  local to = headers:get("location") or ""
  handle:streamInfo():dynamicMetadata():set("tandem", "unfollowed", to:find("^https?://") and "redirect" or "location")
  headers:replace(":status", "503")
  headers:remove("location")
  headers:replace("content-type", "application/json")
  headers:replace("retry-after", "1")
  handle:body(true):setBytes('{"error":{"message":"every way to answer was tried; try again","type":"api_error","param":null,"code":"attempts_exhausted"}}')
end
