package discovery

import (
	"errors"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
)

// CheckSelector returns why a label selector cannot be parsed; nil: it can.
func CheckSelector(selector string) error {
	_, err := labels.Parse(selector)
	return err
}

// CheckLabel returns why no pod can have such a label; nil: one can.
func CheckLabel(name string) error { return invalid(validation.IsQualifiedName(name)) }

// CheckLabelValue returns why no label can have such a value; nil: one can.
func CheckLabelValue(value string) error { return invalid(validation.IsValidLabelValue(value)) }

// CheckName returns why no resource or namespace can have such a name; nil: one can.
func CheckName(name string) error { return invalid(validation.IsDNS1123Subdomain(name)) }

// invalid returns an error of what validation said; nil: nothing.
func invalid(said []string) error {
	if len(said) == 0 {
		return nil
	}
	return errors.New(strings.Join(said, "; "))
}
