function envoy_on_request(request)
  local name = request:headers():get("x-tandem-prefill-server-name")
  if name and name ~= "" then request:headers():replace(":authority", name) end
end
