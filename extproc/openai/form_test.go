package openai

import (
	"bytes"
	"mime/multipart"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// form writes a form of fields and, under "file", a file.
func form(t *testing.T, fields ...string) (contentType, body string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i < len(fields); i += 2 {
		if fields[i] == "file" {
			part, err := w.CreateFormFile("file", "speech.wav")
			require.NoError(t, err)
			_, err = part.Write([]byte(fields[i+1]))
			require.NoError(t, err)
			continue
		}
		require.NoError(t, w.WriteField(fields[i], fields[i+1]))
	}
	require.NoError(t, w.Close())
	return w.FormDataContentType(), b.String()
}

func TestFormModel(t *testing.T) {
	for _, c := range []struct {
		fields      []string
		model, code string
	}{
		{[]string{"model", "whisper", "file", "x"}, "whisper", ""},
		{[]string{"file", strings.Repeat("\r\n--x\r\nname=\"model\"", 9999), "model", "org/w"}, "org/w", ""},
		{[]string{"file", "x", "language", "en"}, "", ""},
		{[]string{"model", "a", "model", "b"}, "", "invalid_form"},
		{[]string{"model", strings.Repeat("a", 2000)}, "", "invalid_model"},
		{[]string{"model", "\xff"}, "", "invalid_model"},
	} {
		kind, body := form(t, c.fields...)
		model, err := FormModel(kind, []byte(body))
		require.Equal(t, c.model, model)
		if c.code != "" {
			var refused *Error
			require.ErrorAs(t, err, &refused)
			require.Equal(t, c.code, refused.Code)
			continue
		}
		require.NoError(t, err)
		_, err = FormModel(kind, []byte(body[:len(body)-10]))
		require.Error(t, err, "cut")
	}
	for _, kind := range []string{"multipart/form-data", "multipart/form-data; boundary=",
		"multipart/form-data; boundary=other"} {
		_, body := form(t, "model", "a")
		_, err := FormModel(kind, []byte(body))
		require.Error(t, err, kind)
	}
}

func FuzzFormModel(f *testing.F) {
	f.Add("multipart/form-data; boundary=x",
		[]byte("--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\na\r\n--x--\r\n"))
	f.Fuzz(func(t *testing.T, kind string, body []byte) {
		model, err := FormModel(kind, body)
		if e := (*Error)(nil); err != nil {
			require.ErrorAs(t, err, &e)
			require.Equal(t, 400, e.Status)
		}
		require.LessOrEqual(t, len(model), maxModelBytes)
	})
}

func TestCheckOther(t *testing.T) {
	for _, c := range []struct {
		kind, encoding string
		read, ok       bool
	}{
		{"application/json", "", true, true}, {"application/json", "", false, false},
		{"application/json", "gzip", true, false},
		{"multipart/form-data; boundary=x", "", false, true}, {"Multipart/Form-Data; boundary=x", "", true, true},
		{"multipart/form-data; boundary=x", "gzip", true, false}, {"text/plain", "", true, false},
		{"", "", false, false},
	} {
		require.Equal(t, c.ok, CheckOther(c.kind, c.encoding, c.read) == nil, "%+v", c)
	}
}
