package main

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the linker. Without it, as after go install, the version is the module's.
var version string

// build is how this program was built.
type build struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func (a *app) versionCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program",
		Long:  "Prints the version of this program, the revision of its source, and the version of Go that built it.",
		Example: `  gpu-cdi-plugin version
  gpu-cdi-plugin version -o json`,
		RunE: func(*cobra.Command, []string) error {
			return out.print(a.stdout, versionView(thisBuild()))
		},
	}
	out.addFlags(cmd, "table", "json", "yaml", "name")
	return cmd
}

func thisBuild() build {
	b := build{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if b.Version == "" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

func versionView(b build) view {
	revision := orDash(b.Revision)
	if b.Modified {
		revision += " (modified)"
	}
	return view{
		data: b,
		table: table{
			header: []string{"VERSION", "REVISION", "GO", "PLATFORM"},
			rows:   [][]string{{b.Version, revision, b.Go, b.Platform}},
		},
		names: []string{b.Version},
	}
}
