package xds

import "fmt"

// risk returns what an Envoy of a release risks, in words; "": nothing that is known. 1.37.5, 1.38.3 and 1.39.0 are the
// first that survive several unexpected answers of an external processor in one gRPC message (CVE-2026-47207). Envoy's
// patch releases of 2026-10-12 (1.37.9, 1.38.7, 1.39.4) are no floor: nobody could run them here, 1.40.0 is what is
// tested.
func risk(major, minor, patch uint32) string {
	at := func(m, p uint32) bool { return major == 1 && minor == m && patch < p }
	switch {
	case major == 1 && minor < 37:
		return fmt.Sprintf("Envoy %d.%d.%d is older than what Tandem is tested with, and can crash (CVE-2026-47207): "+
			"take 1.37.5, 1.38.3, 1.39 or newer", major, minor, patch)
	case at(37, 5), at(38, 3):
		return fmt.Sprintf("Envoy %d.%d.%d can crash if an external processor's answers come in one message "+
			"(CVE-2026-47207): take 1.37.5, 1.38.3, 1.39 or newer", major, minor, patch)
	}
	return ""
}
