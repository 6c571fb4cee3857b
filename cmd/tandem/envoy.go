package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"

	envoyconfigs "tandem/envoy-configs"
	"tandem/envoy-configs/livemodule"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// newEnvoy is `tandem envoy`: it writes the Envoy configuration that belongs to a Tandem configuration to stdout or a
// file: a complete bootstrap, or the resources with which a gateway makes one.
func newEnvoy() *cobra.Command {
	var file, whose, upstream, output, into, resources string
	var xds, check bool
	var o envoyconfigs.ModuleOptions
	c := &cobra.Command{
		Use: "envoy", Short: "Print the Envoy bootstrap that belongs to a configuration", Args: arguments(0),
		RunE: func(c *cobra.Command, _ []string) error {
			if check || resources != "" {
				return checkLive(c.Context(), c.InOrStdin(), c.OutOrStdout(), whose, resources, o)
			}
			text, err := envoy(file, whose, upstream, xds, o)
			if into != "" {
				text, err = intoYours(file, into, xds || whose != "envoy")
			}
			if err != nil {
				return err
			}
			if output != "" {
				err = os.WriteFile(output, text, 0o644) //nolint:gosec // it has no secrets, and Envoy runs as another user
			} else {
				_, err = c.OutOrStdout().Write(text)
			}
			if err != nil {
				return fmt.Errorf("writing what Envoy gets: %w", err)
			}
			return nil
		},
	}
	f := c.Flags()
	fileFlag(f, &file, "configuration `FILE` (YAML)")
	f.StringVarP(&output, "output", "o", "", "`FILE` to write, in place of stdout")
	f.StringVar(&into, "into", "", "`FILE` of an Envoy of yours (YAML): print it with what Tandem needs added")
	f.StringVar(&whose, "for", "envoy", "`TARGET`: envoy (a bootstrap) or envoy-gateway (resources)")
	f.BoolVar(&xds, "xds", false, "a small bootstrap: Envoy gets all else, and changes of it, from tandem serve")
	f.StringVar(&o.Namespace, "namespace", "default", "`NAMESPACE` of the resources for Envoy Gateway")
	f.StringVar(&o.Name, "name", "tandem", "`NAME` of the resources for Envoy Gateway")
	f.StringVar(&o.Gateway, "gateway", "",
		"`NAME/SECTION`: the Gateway and listener that the resources attach to; absent: one of their own")
	f.StringVar(&o.Class, "class", "",
		"`CLASS`: GatewayClass of the Gateway among the resources (default \"eg\", with --standalone a class of their own)")
	f.BoolVar(&o.Standalone, "standalone", false, "Envoy Gateway runs without a cluster and starts Envoy itself")
	f.StringVar(&upstream, "upstream", string(envoyconfigs.OriginalDst),
		"`HOW` Envoy Gateway's Envoy finds endpoints: original-dst or override-host")
	f.StringVar(&o.Library, "library", "/usr/lib/tandem/libtandem.so",
		"`PATH` of the library in Envoy Gateway's Envoy, with envoy.run inside")
	f.BoolVar(&check, "check", false,
		"with --for envoy-gateway and Tandem in its Envoy: hold the cluster's resources (kubectl's) against what is needed")
	f.StringVar(&resources, "resources", "", "--check of a `FILE` of resources, in place of the cluster's; - is stdin")
	f.StringVar(&o.Image, "image", "tandem-envoy", "`IMAGE` of an Envoy that has it")
	return c
}

func envoy(file, whose, upstream string, xds bool, o envoyconfigs.ModuleOptions) ([]byte, error) {
	o.Upstream = envoyconfigs.Upstream(upstream)
	if whose == "envoy" && o.Upstream != envoyconfigs.OriginalDst {
		return nil, fmt.Errorf("--upstream %s: only Envoy Gateway knows endpoints (--for envoy-gateway)", upstream)
	}
	if whose != "envoy" && xds {
		return nil, fmt.Errorf("--xds: --for %s has no bootstrap", whose)
	}
	cfg, _, err := config.Load(file)
	if err != nil {
		return nil, err
	}
	switch inside := config.Inside(cfg); {
	case inside && whose == "envoy-gateway":
		return module(file, cfg, o)
	case inside && (xds || whose != "envoy"):
		return nil, errors.New("envoy.run is inside, for which there is one bootstrap: without --xds, --for envoy")
	case inside:
		path, err := filepath.Abs(file)
		if err != nil {
			return nil, err
		}
		return envoyconfigs.Inside(cfg, path)
	case whose == "envoy" && xds:
		return envoyconfigs.DynamicBootstrap(cfg)
	case whose == "envoy":
		return envoyconfigs.Bootstrap(cfg)
	case whose == "envoy-gateway":
		return envoyconfigs.EnvoyGateway(cfg, o.GatewayOptions)
	default:
		return nil, fmt.Errorf("--for %q: it is envoy or envoy-gateway", whose)
	}
}

// inGateway is where a configuration file lies in Envoy Gateway's Envoy.
const inGateway = "/etc/tandem/tandem.yaml"

// module prints the resources for an Envoy Gateway whose Envoy loads Tandem. The configuration stands in the policy if
// nothing in it is for the gateway's owner alone, else in a file.
func module(file string, cfg *configv1.Config, o envoyconfigs.ModuleOptions) ([]byte, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if o.Config, err = config.ForPolicy(text); err != nil {
		return nil, err
	}
	if o.Config == nil {
		o.Config, o.File = text, inGateway
	}
	if o.Upstream != envoyconfigs.OriginalDst {
		return nil, fmt.Errorf("--upstream %s: not with envoy.run inside", o.Upstream)
	}
	return envoyconfigs.EnvoyGatewayModule(cfg, o)
}

// intoYours adds what Tandem needs to a bootstrap of the reader's.
func intoYours(file, into string, other bool) ([]byte, error) {
	if other {
		return nil, errors.New("--into adds to a static bootstrap: it goes without --xds and --for")
	}
	cfg, _, err := config.Load(file)
	if err != nil {
		return nil, err
	}
	if config.Inside(cfg) {
		return nil, errors.New("--into: envoy.run is inside, whose bootstrap is an Envoy of its own")
	}
	mine, err := os.ReadFile(into)
	if err != nil {
		return nil, fmt.Errorf("--into: %w", err)
	}
	text, err := envoyconfigs.Into(mine, cfg)
	if err != nil {
		return nil, fmt.Errorf("--into %s: %w", into, err)
	}
	return text, nil
}

// checkLive holds resources against what a route needs that Tandem answers in Envoy Gateway's Envoy: those of a file, or
// of kubectl's cluster, as far as it may read them. The error says that something is missing or wrong.
func checkLive(ctx context.Context, stdin io.Reader, stdout io.Writer, whose, file string, o envoyconfigs.ModuleOptions) error {
	if whose != "envoy-gateway" {
		return errors.New("--check: only resources of Envoy Gateway are checked (--for envoy-gateway)")
	}
	from := stdin
	switch file {
	case "-":
	case "":
		kubectl := exec.CommandContext(ctx, "kubectl", "get", livemodule.Kinds, "--all-namespaces", "-o", "json")
		var notRead bytes.Buffer
		kubectl.Stderr = &notRead
		text, err := kubectl.Output()
		if len(text) == 0 && err != nil {
			return fmt.Errorf("%s: %w\n%s", kubectl, err, notRead.Bytes())
		}
		if notRead.Len() > 0 {
			fmt.Fprintf(stdout, "kubectl could not read all, so what is said to be missing may be there:\n%s", notRead.Bytes())
		}
		from = bytes.NewReader(text)
	default:
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		from = bytes.NewReader(text)
	}
	all, err := livemodule.Read(from)
	if err != nil {
		return err
	}
	found := livemodule.Check(all, o.Namespace, o.Name)
	for _, line := range found {
		fmt.Fprintf(stdout, "- %s\n", line)
	}
	if len(found) > 0 {
		return fmt.Errorf("%d things are missing or wrong", len(found))
	}
	fmt.Fprintf(stdout, "EnvoyExtensionPolicy %s/%s: nothing is missing\n", o.Namespace, o.Name)
	return nil
}
