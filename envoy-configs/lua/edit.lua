local key = '"kv_transfer_params":'
local gone = 'event: error\ndata: {"type":"error","error":{"message":"the endpoint stood still until the KV of this prompt may have been freed; try again","type":"api_error","param":null,"code":"kv_outdated"}}\n\n'
-- cutter takes the object that follows the key out of a text that comes in pieces. What may be the key's beginning is
-- kept for the next piece.
local function cutter()
  local kept, depth, quoted = "", nil, false
  return function(piece)
    local text, out, at = kept .. piece, {}, 1
    kept = ""
    while at <= #text do
      if depth == nil then
        local from, to = text:find(key, at, true)
        if not from then
          local tail = #text
          while tail > at and tail > #text - #key - 1 and text:byte(tail) ~= 44 do tail = tail - 1 end
          if text:byte(tail) == 44 and ("," .. key .. " {"):find(text:sub(tail), 1, true) == 1 then
            out[#out + 1], kept = text:sub(at, tail - 1), text:sub(tail)
          else
            out[#out + 1] = text:sub(at)
          end
          break
        end
        local open = text:match("^%s*()", to + 1)
        if open > #text then
          local comma = (text:byte(from - 1) == 44 and from > at) and 1 or 0
          out[#out + 1], kept = text:sub(at, from - 1 - comma), text:sub(from - comma)
          break
        elseif text:byte(open) ~= 123 then
          out[#out + 1], at = text:sub(at, to), to + 1
        else
          local comma = (text:byte(from - 1) == 44 and from > at) and 1 or 0
          out[#out + 1] = text:sub(at, from - 1 - comma)
          if comma == 0 then out[#out + 1] = '"kv_transfer_params":null' end
          depth, at = 0, open
        end
      else
        local mark = text:match(quoted and '^[^"\\]*()' or '^[^"{}]*()', at) -- a step for each byte is slow without a JIT
        if mark > #text then break end
        local c = text:byte(mark)
        at = mark + 1
        if c == 92 then
          if mark == #text then kept = "\\" else at = mark + 2 end
        elseif c == 34 then quoted = not quoted
        elseif c == 123 then depth = depth + 1
        elseif depth > 1 then depth = depth - 1
        else depth = nil end
      end
    end
    return table.concat(out)
  end
end
-- begins reports whether a piece has more than comments, which say nothing of the engine.
local function begins(piece)
  return piece:length() > 0 and ("\n" .. piece:getBytes(0, piece:length())):find("[\r\n][^:\r\n]") ~= nil
end
function envoy_on_response(handle)
  local headers = handle:headers()
  local cuts = headers:get("x-tandem-rule"):find("^%S+ %d+ cut ") ~= nil
  local stream = (headers:get("content-type") or ""):find("event-stream", 1, true) ~= nil
  if not stream then
    if cuts then
      local body = handle:body(true)
      local text = body:getBytes(0, body:length())
      if text:find(key, 1, true) then
        handle:headers():replace("content-length", body:setBytes(cutter()(text)))
      end
    end
    return
  end
  local told, cut = false, cuts and cutter() or nil
  for chunk in handle:bodyChunks() do
    local text
    if told then
      text = ""
    elseif (handle:streamInfo():dynamicMetadata():get("tandem.answer") or {})["refused"] then
      told, text = true, gone
    elseif cut then
      text = chunk:getBytes(0, chunk:length())
      local left = cut(text)
      if left == text then text = nil else text = left end
    elseif begins(chunk) then
      return
    end
    if text then chunk:setBytes(text) end
  end
end
