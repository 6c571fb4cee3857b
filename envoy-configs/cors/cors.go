// Package cors is the script with which Envoy answers browsers' preflights and adds CORS headers to every answer.
package cors

import (
	_ "embed"
	"fmt"
	"strconv"
	"strings"
	"time"

	configv1 "tandem/protos/config/v1"
)

//go:embed cors.lua
var script string

// Script returns the source for a filter of Envoy (Lua) that does what is configured.
func Script(c *configv1.Cors) string {
	var head strings.Builder
	table := func(name string, pairs ...string) {
		head.WriteString(name + " = {")
		for i := 0; i < len(pairs); i += 2 {
			fmt.Fprintf(&head, "[%q]=%s,", pairs[i], pairs[i+1])
		}
		head.WriteString("}\n")
	}
	var origins []string
	for _, o := range c.GetAllowOrigins() {
		origins = append(origins, o, "true")
	}
	table("origins", origins...)
	age, _ := time.ParseDuration(c.GetMaxAge()) // the configuration is valid
	table("preflight", "access-control-allow-methods", `"GET, POST, DELETE, OPTIONS"`,
		"access-control-allow-headers", strconv.Quote(strings.Join(c.GetAllowHeaders(), ", ")),
		"access-control-max-age", strconv.Quote(strconv.Itoa(int(age.Seconds()))))
	exposed := []string{"access-control-expose-headers", strconv.Quote(strings.Join(c.GetExposeHeaders(), ", "))}
	if c.GetAllowCredentials() {
		exposed = append(exposed, "access-control-allow-credentials", `"true"`)
	}
	table("exposed", exposed...)
	return head.String() + script
}
