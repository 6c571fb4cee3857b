package config

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	configv1 "tandem/protos/config/v1"
)

// checkFields checks the values of a message, and of those within it, by the options of their fields in config.proto.
func checkFields(v *validator, path string, message protoreflect.Message) {
	message.Range(func(f protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		at := Join(path, f.JSONName())
		switch {
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			for i := range value.List().Len() {
				checkFields(v, fmt.Sprintf("%s[%d]", at, i), value.List().Get(i).Message())
			}
		case f.Kind() == protoreflect.MessageKind:
			checkFields(v, at, value.Message())
		default:
			if words := wordsOf(f); len(words) > 0 {
				checkOneOf(v, at, value.String(), words...)
			}
			checkRange(v, at, f, value)
		}
		return true
	})
}

// wordsOf returns the words that a text may be; none: any.
func wordsOf(f protoreflect.FieldDescriptor) []string {
	words, _ := proto.GetExtension(f.Options(), configv1.E_Words).(string)
	return strings.Fields(words)
}

// rangeOf returns the least and the most that a field may be, as the file has them, and behind a colon why; empty: any.
func rangeOf(f protoreflect.FieldDescriptor) (least, most, why string) {
	text, _ := proto.GetExtension(f.Options(), configv1.E_Range).(string)
	least, most, _ = strings.Cut(text, " to ")
	if i := strings.IndexByte(most, ':'); i >= 0 {
		most, why = most[:i], most[i:]
	}
	return least, most, why
}

// checkRange checks a number, a size or a duration.
func checkRange(v *validator, path string, f protoreflect.FieldDescriptor, value protoreflect.Value) {
	least, most, why := rangeOf(f)
	if most == "" {
		return
	}
	switch n := value.Interface().(type) {
	case string:
		d, err := time.ParseDuration(n)
		if err != nil {
			v.m.add(path, "%.40q is not a duration such as 300s, 5m or 250ms", n)
		} else if d < Duration(least) || d > Duration(most) {
			v.m.add(path, "%.40s is not between %s and %s%s", n, least, most, why)
		}
	case int64:
		low, _ := bytesOf(least)
		high, _ := bytesOf(most)
		if n >= low && n <= high {
			return
		}
		text := strconv.FormatInt(n, 10)
		if strings.HasSuffix(f.JSONName(), "Bytes") {
			text = sizeText(n)
		}
		v.m.add(path, "%s is not between %s and %s%s", text, least, most, why)
	default:
		number, err := strconv.ParseFloat(fmt.Sprint(n), 64)
		low, _ := strconv.ParseFloat(least, 64)
		high, _ := strconv.ParseFloat(most, 64)
		if err != nil || math.IsNaN(number) || number < low || number > high {
			v.m.add(path, "%v is not between %s and %s%s", n, least, most, why)
		}
	}
}

func checkOneOf(v *validator, path, value string, allowed ...string) {
	if slices.Contains(allowed, value) {
		return
	}
	is := fmt.Sprintf("%.40q is", value)
	if value == "true" || value == "false" { // the file may have another word, which YAML reads so
		is = "is " + value + " (YAML reads yes and on as true, no and off as false), which is"
	}
	if why := gone[strings.ToLower(value)]; why != "" {
		v.m.add(path, "%s gone: %s", is, why)
		return
	}
	v.m.add(path, "%s not one of %s%s", is, strings.Join(allowed, ", "), meant(value, allowed))
}

// gone says what is used in place of words that were allowed once, and since when.
var gone = map[string]string{
	"p2p-nccl":         noNCCL,
	"p2pncclconnector": noNCCL,
	"mooncake-0.13":    "only vLLM 0.13 and 0.14 have it; use mooncake, with vLLM 0.16 or newer",
}

const noNCCL = "vLLM has no P2pNcclConnector since 0.24; use nixl, with the engines' NixlConnector"

// meant is "; did you mean WORD?" with the allowed word that was probably meant, "" if none is near.
func meant(value string, allowed []string) string {
	near := engineWords[strings.ToLower(value)]
	if !slices.Contains(allowed, near) {
		near = nearest(value, allowed)
	}
	if near == "" { // an engine's own word, misspelt
		near = engineWords[nearest(value, slices.Sorted(maps.Keys(engineWords)))]
	}
	if !slices.Contains(allowed, near) {
		return ""
	}
	return "; did you mean " + near + "?"
}

// engineWords translate the engines' own names of connectors and roles, as in their flags, in lower case.
var engineWords = map[string]string{
	"nixlconnector": "nixl", "nixlpullconnector": "nixl", "nixlpushconnector": "nixl-push",
	"mooncakeconnector": "mooncake", "moriioconnector": "moriio",
	"lmcacheconnectorv1": "lmcache", "lmcacheconnector": "lmcache", "lmcachempconnector": "lmcache",
	"multiconnector": "multi", "offloadingconnector": "offload",
	"mooncakestoreconnector": "shared", "mooncake-store": "shared", "sharedstorageconnector": "shared",
	"exampleconnector": "shared", "hf3fskvconnector": "shared", "flexkvconnectorv1": "shared",
	"tensorrt-llm": "trtllm", "vllm": "nixl", "sgl": "sglang",
	"kv_producer": "prefill", "ec_producer": "encode", "kv_consumer": "decode", "kv_both": "both",
	"prefiller": "prefill", "decoder": "decode", "prefill-decode": "both", "context": "prefill", "generation": "decode",
}
