package openai

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
	"strings"
	"unicode/utf8"
)

// IsForm reports whether a content type is that of an upload.
func IsForm(contentType string) bool {
	kind, _, _ := strings.Cut(contentType, ";")
	return strings.EqualFold(strings.TrimSpace(kind), "multipart/form-data")
}

// maxFormParts bounds the parts of a form: real ones have ten.
const maxFormParts = 1000

// FormModel returns the model that an upload names in its field model, "" if it names none. An error is an [*Error]
// with status 400: a form that cannot be read, or one that names two models, of which engines take the last.
func FormModel(contentType string, body []byte) (model string, err error) {
	_, params, err := mime.ParseMediaType(contentType)
	if err != nil || params["boundary"] == "" {
		return "", BadRequest("invalid_form", "", "the content-type of the form names no boundary")
	}
	parts, found := multipart.NewReader(bytes.NewReader(body), params["boundary"]), false
	for range maxFormParts {
		part, err := parts.NextRawPart()
		if err == io.EOF { //nolint:errorlint // one that is wrapped is an end before the last boundary
			return model, nil
		}
		if err != nil {
			return "", BadRequest("invalid_form", "", "the form cannot be read")
		}
		if part.FormName() != "model" || part.FileName() != "" {
			continue
		}
		if found {
			return "", BadRequest("invalid_form", "model", "the form names model twice")
		}
		found = true
		value, err := io.ReadAll(io.LimitReader(part, maxModelBytes+1))
		if err != nil {
			return "", BadRequest("invalid_form", "model", "the form ends in its field model")
		}
		if len(value) > maxModelBytes || !utf8.Valid(value) {
			return "", BadRequest("invalid_model", "model", "model is too long or not valid Unicode")
		}
		model = string(value)
	}
	return "", BadRequest("invalid_form", "", "the form has too many parts")
}

// CheckOther returns an [*Error] for a body that an engine might read as JSON although Tandem does not: Tandem reads
// application/json only, and nothing reads forms as JSON. read reports whether the body came to Tandem.
func CheckOther(contentType, contentEncoding string, read bool) error {
	kind, _, _ := strings.Cut(contentType, ";")
	switch {
	case strings.EqualFold(strings.TrimSpace(kind), "application/json") && read:
		return CheckHeaders(contentType, contentEncoding)
	case strings.EqualFold(strings.TrimSpace(kind), "application/json"):
		// Envoy's routes are not those of `tandem envoy`
		return UnsupportedMediaType("a JSON body did not come to the router")
	case !IsForm(contentType):
		return UnsupportedMediaType("content-type must be application/json or multipart/form-data on this path")
	case read && contentEncoding != "" && !strings.EqualFold(contentEncoding, "identity"):
		return UnsupportedMediaType("content-encoding is not supported for forms; send the form uncompressed")
	}
	return nil
}
