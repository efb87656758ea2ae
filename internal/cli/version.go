package cli

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the linker. If it is empty, as after go install, the module's version is used.
var version string

// Build describes how this program was built.
type Build struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func (p *Program) versionCommand() *cobra.Command {
	var out Output
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this program",
		Long:    "Prints the version of this program, the revision of its source, and the version of Go that built it.",
		Example: p.examples("version", "version -o json"),
		RunE: func(*cobra.Command, []string) error {
			return out.Print(p.Stdout, versionView(ThisBuild()))
		},
	}
	out.AddFlags(cmd, "table", "json", "yaml", "name")
	return cmd
}

// ThisBuild returns how this program was built.
func ThisBuild() Build {
	b := Build{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
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

func versionView(b Build) View {
	revision := OrDash(b.Revision)
	if b.Modified {
		revision += " (modified)"
	}
	return View{
		Data: b,
		Table: Table{
			Header: []string{"VERSION", "REVISION", "GO", "PLATFORM"},
			Rows:   [][]string{{b.Version, revision, b.Go, b.Platform}},
		},
		Names: []string{b.Version},
	}
}
