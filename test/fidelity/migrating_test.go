package fidelity

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/test/lib/guide"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// migrating is the guide that says for each option of NVIDIA's programs what stands for it here.
const migrating = "docs/migrating.md"

// TestTheGuideHasAllOptionsOfNVIDIA reads the options from the programs' own help, and those of programs that are not
// built here from their sources.
func TestTheGuideHasAllOptionsOfNVIDIA(t *testing.T) {
	t.Parallel()
	plugin := module(t, "deviceplugin", "k8s-device-plugin")
	toolkit := module(t, "", "nvidia-container-toolkit")
	for from, options := range map[string][]string{
		"nvidia-device-plugin --help":       optionsOf(help(t, shared.NodePeer(t, "nvidia-device-plugin"))),
		"nvidia-ctk --help":                 optionsOf(helpOfAll(t, shared.Peer(t, "nvidia-ctk"))),
		"the variables of the health check": find(t, plugin, "internal/rm/health.go", `"(DP_[A-Z_]+)"`),
		"the plugin's configuration file":   find(t, plugin, "api/config/v1/*.go", `json:"(\w+)`),
		"gpu-feature-discovery":             goOptions(t, plugin, "cmd/gpu-feature-discovery/*.go"),
		"mps-control-daemon":                goOptions(t, plugin, "cmd/mps-control-daemon/*.go"),
		"its config-manager":                flagsOf(t, plugin, "cmd/config-manager/*.go"),
		"the chart":                         values(t, plugin),
		"config.toml":                       find(t, toolkit, "api/config/v1/*.go", `toml:"([a-z0-9-]+)`),
		"hooks":                             find(t, toolkit, "internal/discover/hooks.go", `HookName\("([a-z-]+)"\)`),
	} {
		if len(options) == 0 {
			t.Errorf("no option of %s was found", from)
		}
		for _, option := range options {
			if !names(guide.Read(t, migrating), option) {
				t.Errorf("%s does not say what stands for %s of %s", migrating, option, from)
			}
		}
	}
}

var code = regexp.MustCompile("`([^`\n]+)`")

// names reports whether a text has an option in code, as a word of its own. A value a.b of a chart can be part of
// "a.*".
func names(text, option string) bool {
	word := regexp.MustCompile(`(^|[^\w-])` + regexp.QuoteMeta(option) + `($|[^\w-])`)
	for _, match := range code.FindAllStringSubmatch(text, -1) {
		group, isGroup := strings.CutSuffix(match[1], "*")
		if word.MatchString(match[1]) || isGroup && strings.HasPrefix(option, group) {
			return true
		}
	}
	return false
}

var (
	flagLine = regexp.MustCompile(`(?m)^ +(--?[a-z].*)$`)
	flagName = regexp.MustCompile(`^--?[A-Za-z][\w.-]*`)
	variable = regexp.MustCompile(`\$([A-Z_]+)`)
	verbLine = regexp.MustCompile(`(?m)^   ([a-z][a-z-]+)(?:, \w+)?(?:  |$)`)
)

// optionsOf returns the flags and variables in the output of --help.
func optionsOf(help string) []string {
	found := map[string]bool{}
	for _, line := range flagLine.FindAllStringSubmatch(help, -1) {
		names, _, _ := strings.Cut(line[1], "  ")
		for name := range strings.SplitSeq(names, ", ") {
			if flag := flagName.FindString(strings.TrimSpace(name)); flag != "" {
				found[flag] = true
			}
		}
	}
	for _, match := range variable.FindAllStringSubmatch(help, -1) {
		found[match[1]] = true
	}
	return slices.Sorted(maps.Keys(found))
}

func help(t *testing.T, args ...string) string {
	t.Helper()
	return proc.Must(t, 0, proc.Cmd{Args: append(args, "--help")}).Stdout
}

// helpOfAll returns the help of a program and of all its verbs.
func helpOfAll(t *testing.T, args ...string) string {
	t.Helper()
	all := help(t, args...)
	_, verbs, _ := strings.Cut(all, "\nCOMMANDS:\n")
	verbs, _, _ = strings.Cut(verbs, "\n\n")
	for _, match := range verbLine.FindAllStringSubmatch(verbs, -1) {
		if match[1] != "help" {
			all += helpOfAll(t, append(slices.Clone(args), match[1])...)
		}
	}
	return all
}

// module returns the directory of the sources of one of NVIDIA's modules, in the version that scripts/peers builds.
func module(t *testing.T, peers, name string) string {
	t.Helper()
	root, err := suite.Root()
	testenv.Must(t, err)
	return strings.TrimSpace(proc.Must(t, 0, proc.Cmd{
		Args: []string{"go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/" + name},
		Dir:  filepath.Join(root, "test/peers", peers),
	}).Stdout)
}

// find returns what a pattern matches in source files, but not in tests.
func find(t *testing.T, module, files, pattern string) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(module, files))
	testenv.Must(t, err)
	found := map[string]bool{}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		text, err := os.ReadFile(path)
		testenv.Must(t, err)
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1) {
			found[match[1]] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// goOptions returns the flags and the variables that sources declare.
func goOptions(t *testing.T, module, files string) []string {
	t.Helper()
	return append(flagsOf(t, module, files), find(t, module, files, `EnvVars: +\[\]string\{"([A-Z_]+)"`)...)
}

func flagsOf(t *testing.T, module, files string) (all []string) {
	t.Helper()
	for _, name := range append(find(t, module, files, `\bName: +"([a-z][a-z-]+)"`),
		find(t, module, files, `Aliases: +\[\]string\{"([a-z][a-z-]+)"`)...) {
		all = append(all, "--"+name)
	}
	return all
}

// values returns the values of the chart, as paths like a.b.c.
func values(t *testing.T, module string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(module, "deployments/helm/nvidia-device-plugin/values.yaml"))
	testenv.Must(t, err)
	var tree map[string]any
	testenv.Must(t, yaml.Unmarshal(text, &tree))
	return leaves("", tree)
}

func leaves(prefix string, tree map[string]any) (all []string) {
	for key, value := range tree {
		if below, ok := value.(map[string]any); ok && len(below) > 0 {
			all = append(all, leaves(prefix+key+".", below)...)
		} else {
			all = append(all, prefix+key)
		}
	}
	return all
}
