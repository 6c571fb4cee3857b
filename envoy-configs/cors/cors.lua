-- Preflights of browsers, and CORS headers on every answer. Envoy's own CORS filter passes over requests without a
-- route to a cluster, and a request has none before ext_proc has decided, nor when ext_proc answers it.
function allowed(origin)
  return origin and (origins["*"] or origins[origin])
end

function envoy_on_request(handle)
  local h = handle:headers()
  local origin = h:get("origin")
  if allowed(origin) then
    handle:streamInfo():dynamicMetadata():set("tandem.cors", "origin", origin)
  end
  if origin and h:get(":method") == "OPTIONS" and h:get("access-control-request-method") then
    local answer = {[":status"] = "200"}
    if allowed(origin) then
      for name, value in pairs(preflight) do answer[name] = value end
    end
    handle:respond(answer, "")
  end
end

function envoy_on_response(handle)
  local h = handle:headers()
  for _, name in ipairs({"access-control-allow-origin", "access-control-allow-credentials", "access-control-expose-headers"}) do
    h:remove(name)
  end
  local cors = handle:streamInfo():dynamicMetadata():get("tandem.cors")
  if cors then
    h:replace("access-control-allow-origin", cors["origin"])
    for name, value in pairs(exposed) do h:replace(name, value) end
    h:add("vary", "origin")
  end
end
