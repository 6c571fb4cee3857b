-- Tokens that answers say, for the access log (docs/adr/0069). Most events of a stream say none: they cost a look for a word.
local namespace = "tandem.usage"
local longest, largest = 1048576, 4194304 -- bytes of a stream's line, and of another answer; more pass unread
local believed = 67108864 -- tokens of an answer: a limit leaves out what cannot be, as the reader of the log does
-- Members with numbers, and the keys that these get.
local usage = {prompt_tokens = "in", completion_tokens = "out", input_tokens = "in", output_tokens = "out",
  cache_read_input_tokens = "cache_read", cache_creation_input_tokens = "cache_write"}
local start = {input_tokens = "in", cache_read_input_tokens = "cache_read", cache_creation_input_tokens = "cache_write"}
local details = {cached_tokens = "cached"}
local meta = {prompt_tokens = "in", completion_tokens = "out", cached_tokens = "cached"} -- of SGLang's generate
-- skeleton puts null for all texts of JSON but names of members: what is left of quotes and brackets is JSON's own. It
-- looks for quotes alone, which is fast in long texts and long lists of numbers.
local function skeleton(text)
  local out, at = {}, 1
  while true do
    local open = text:find('"', at, true)
    if not open then break end
    local close = open
    repeat
      close = text:find('"', close + 1, true)
      if not close then return "" end
      local slashes = close
      while text:byte(slashes - 1) == 92 do slashes = slashes - 1 end
    until (close - slashes) % 2 == 0
    out[#out + 1] = text:sub(at, open - 1)
    out[#out + 1] = text:find("^%s*:", close + 1) and text:sub(open, close) or "null"
    at = close + 1
  end
  out[#out + 1] = text:sub(at)
  return table.concat(out)
end
-- members returns those of a skeleton's object that are objects, by their names, and the text of the others.
local function members(object)
  local found = {}
  local flat = object:sub(2, -2):gsub("%b[]", "null"):gsub('"([^"]*)"%s*:%s*(%b{})', function(name, value)
    found[name] = value
    return ""
  end)
  return found, flat
end
local function take(data, object, keys)
  if not object then return end
  local inner, flat = members(object)
  for name, value in flat:gmatch('"([^"]*)"%s*:%s*([^%s,]+)') do
    local n = keys[name] and tonumber(value)
    if n then data:set(namespace, keys[name], (n >= 0 and n < 9007199254740992) and n or -1) end
  end
  if keys == usage then
    take(data, inner.prompt_tokens_details or inner.input_tokens_details, details)
  end
end
-- total is what a limit counts. Anthropic's form has the tokens of a cache beside those of the prompt.
local function total(data)
  local said, sum = data:get(namespace), 0
  if not said then return end
  for _, key in ipairs({"in", "out", "cache_read", "cache_write"}) do
    local n = said[key] or 0
    if n > 0 and n <= believed and n % 1 == 0 then sum = sum + n end
  end
  data:set(namespace, "total", sum)
end
local function parse(data, text)
  local last = text:find("^%s*{") and text:match('"usage"%s*:%s*(%b{})[^{}%[%]]*}%s*$')
  if last then -- the last object of all: what is before it need not be read
    take(data, skeleton(last), usage)
    return
  end
  local top = skeleton(text):match("^%s*(%b{})")
  if not top then return end
  local found = members(top)
  if found.message then take(data, members(found.message).usage, start) end
  if found.response then take(data, members(found.response).usage, usage) end
  take(data, found.usage, usage)
  take(data, found.meta_info, meta)
end
local function read(handle, text)
  if not text:find('"usage"%s*:%s*{') and not text:find('"meta_info"%s*:%s*{') then return end
  local data = handle:streamInfo():dynamicMetadata()
  parse(data, text)
  total(data)
end
-- lines reads whole lines.
local function lines(handle, text)
  if not text:find('usage"', 1, true) and not text:find('"meta_info"', 1, true) then return end
  for line in text:gmatch("[^\r\n]+") do
    if line:find("^data:") then read(handle, line:sub(6)) end
  end
end
local function stream(handle)
  local kept, size = {}, 0 -- the beginning of a line, in pieces
  for chunk in handle:bodyChunks() do
    local text = chunk:getBytes(0, chunk:length())
    if size == 0 and text:byte(-1) == 10 then
      lines(handle, text)
    else
      local last = text:match("^.*()\n") or 0
      if last > 0 then
        kept[#kept + 1] = text:sub(1, last)
        lines(handle, table.concat(kept))
        kept, size, text = {}, 0, text:sub(last + 1)
      end
      if text ~= "" then kept[#kept + 1], size = text, size + #text end
      if size > longest then kept, size = {"-"}, 1 end -- so that its rest is no line of data
    end
  end
  lines(handle, table.concat(kept))
end
local function whole(handle)
  local kept, size = {}, 0
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    size = size + length
    if size > largest then return end
    kept[#kept + 1] = chunk:getBytes(0, length)
  end
  read(handle, table.concat(kept))
end
function envoy_on_response(handle)
  if (handle:headers():get("content-type") or ""):find("event-stream", 1, true) then
    stream(handle)
  else
    whole(handle)
  end
end
