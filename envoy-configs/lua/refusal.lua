local names = {"bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params", "disaggregated_params"}
local values = {"'[^']*'", '"[^"]*"', "%b[]", "%b{}", "%d+", "None", "null"}
function envoy_on_response(handle)
  local body = handle:body(true)
  local whole = body:getBytes(0, body:length())
  local text = whole
  for _, name in ipairs(names) do
    if text:find(name, 1, true) then
      for _, value in ipairs(values) do
        text = text:gsub("(['\"])" .. name .. "%1: ?" .. value .. ",? ?", "")
      end
    end
  end
  if text ~= whole then
    handle:headers():replace("content-length", body:setBytes(text))
  end
end
