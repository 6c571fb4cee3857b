package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"

	"tandem/extproc/telemetry"
	"tandem/picker/roles"
	"tandem/status"
)

// fillTexts sets all texts of a value, with one element in each list and map; what stops it is depth.
func fillTexts(v reflect.Value, text string, depth int) {
	switch {
	case depth == 0 || !v.CanSet():
	case v.Kind() == reflect.String:
		v.SetString(text)
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fillTexts(v.Elem(), text, depth-1)
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fillTexts(v.Index(0), text, depth-1)
	case v.Kind() == reflect.Map && v.Type().Key().Kind() == reflect.String:
		element := reflect.New(v.Type().Elem()).Elem()
		fillTexts(element, text, depth-1)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf(text).Convert(v.Type().Key()), element)
	case v.Kind() == reflect.Struct && v.Type().PkgPath() != "time":
		for _, field := range v.Fields() {
			fillTexts(field, text, depth-1)
		}
	}
}

// Whatever text a replica's answer has, commands print it without control characters, and it begins no line: every text
// of every answer, as a table, as JSON, and in errors.
func TestAnswersAreShownPlain(t *testing.T) {
	const hostile = "x\x1b[2J\nPROBLEM all is out\u202e\u009b31m\x7f"
	fail := false
	filled := func(v any) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if fail {
				http.Error(w, hostile, http.StatusTeapot)
				return
			}
			w.Header().Set(status.ScopeHeader, "this replica\u009b31m")
			value := reflect.New(reflect.TypeOf(v)).Elem()
			fillTexts(value, hostile, 12)
			_ = json.NewEncoder(w).Encode(value.Interface())
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/status.json", filled(status.Status{}))
	mux.HandleFunc("/debug/requests", filled([]telemetry.Trace{}))
	mux.HandleFunc("/debug/roles", filled(map[string]roles.Advice{}))
	mux.HandleFunc("/debug/explain", filled(status.Explained{}))
	s := httptest.NewServer(mux)
	defer s.Close()
	for _, command := range [][]string{{"status"}, {"requests"}, {"explain", "ID"}, {"explain", "--tokens", "1000"}, {"weights"}} {
		for _, format := range []string{"table", "json", "refused"} {
			fail = format == "refused"
			args := append(command, "--admin", strings.TrimPrefix(s.URL, "http://"), "--output", strings.Replace(format, "refused", "table", 1))
			var out, errs strings.Builder
			err := run(t.Context(), args, &out, &errs)
			got := out.String() + errs.String()
			if fail {
				require.Error(t, err, args)
				got += shown(err)
			} else {
				require.NoError(t, err, args)
				require.Contains(t, got, "[2J", args)
				require.NotContains(t, "\n"+got, "\nPROBLEM all", args)
			}
			for _, r := range got {
				require.True(t, r == '\n' || unicode.IsPrint(r), "%q prints %q:\n%s", args, r, got)
			}
		}
	}
}

// Lines of tables end where the terminal does, whatever their colour; notices wrap.
func TestRowsAreCut(t *testing.T) {
	text := "warning  a long notice\n  status  at\n  200     03:33\n\x1b[31m  503     03:34\x1b[0m\n  ünïcödé  x\n"
	require.Equal(t, "warning  a long notice\n  status \n  200    \n\x1b[31m  503    \x1b[0m\n  ünïcödé\n", cutRows(text, 9))
	require.Equal(t, text, cutRows(text, 80))
	require.Equal(t, text, cutRows(text, 5000))
}
