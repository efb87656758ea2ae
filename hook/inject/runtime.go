package inject

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/yamlfile"
)

// Command is a parsed command line of an OCI runtime.
type Command struct {
	// Verb is empty if the command has none, like "runc --version".
	Verb string
	// Bundle is the directory of the container's config.json. It may be a relative path.
	Bundle string
	ID     string
	// Log is the file for messages, or empty. LogFormat is "json", "text" or empty.
	Log, LogFormat string
}

// Creates reports whether the command creates a container from a bundle.
func (c Command) Creates() bool { return c.Verb == "create" || c.Verb == "run" }

// takesValue has the options of runc and crun whose value can be the next argument, without their hyphens.
var takesValue = []string{
	"log", "log-format", "log-level", "root", "criu", "rootless", "cgroup-manager", // before the verb
	"bundle", "b", "config", "f", "console-socket", "pid-file", "pidfd-socket", "preserve-fds", // of create and run
}

// flags are the options without a value.
var flags = []string{
	"debug", "systemd-cgroup", "help", "h", "?", "usage", "version", "v", "V", // before the verb
	"detach", "d", "keep", "no-pivot", "no-new-keyring", "no-subreaper", // of create and run
}

// ParseCommand parses the arguments of a runtime, without the program's name. It knows the options of runc and crun
// before the verb and those of `create` and `run`; after any other verb it parses nothing. If it cannot determine the
// verb or the bundle, it returns an error, since the container would start without its devices.
func ParseCommand(args []string) (Command, error) {
	c := Command{Bundle: "."}
	for i := 0; i < len(args); i++ {
		arg := args[i]
		switch {
		case c.Verb != "" && (!c.Creates() || arg == "--"):
			if c.Creates() && i+1 < len(args) {
				c.ID = cmp.Or(c.ID, args[i+1])
			}
			return c, nil
		case !strings.HasPrefix(arg, "-") || arg == "-":
			if c.Verb != "" {
				c.ID = cmp.Or(c.ID, arg)
			}
			c.Verb = cmp.Or(c.Verb, arg)
			continue
		}
		name, value, hasValue := splitOption(arg)
		switch known := slices.Contains(flags, name); {
		case slices.Contains(takesValue, name) && !hasValue:
			if i++; i == len(args) {
				return c, nil // the runtime reports the mistake
			}
			value = args[i]
		case !known && c.Verb == "" && !hasValue:
			return c, fmt.Errorf("option %.100q before the verb is unknown: "+
				"write it with its value, as in --option=value", arg)
		case !known && !hasValue && !strings.HasPrefix(arg, "--"):
			return c, fmt.Errorf("option %.100q is unknown: write each option by itself", arg)
		}
		if err := c.set(name, value); err != nil {
			return c, err
		}
	}
	return c, nil
}

// splitOption splits an argument into the option's long name and its value. Runc accepts one hyphen instead of two.
// Crun accepts abbreviated long names, and a value directly after a short name, like -bDIR.
func splitOption(arg string) (name, value string, hasValue bool) {
	name, value, hasValue = strings.Cut(strings.TrimLeft(arg, "-"), "=")
	isLong := slices.Contains(takesValue, name) || slices.Contains(flags, name)
	if !isLong && !strings.HasPrefix(arg, "--") && strings.ContainsAny(name[:min(1, len(name))], "bf") {
		return name[:1], arg[2:], true
	}
	for _, long := range []string{"bundle", "config"} {
		if !isLong && len(name) > 1 && strings.HasPrefix(long, name) {
			name = long
		}
	}
	return name, value, hasValue
}

func (c *Command) set(name, value string) error {
	switch name {
	case "bundle", "b":
		c.Bundle = value
	case "help", "h", "?", "usage":
		c.Verb = "help"
	case "log":
		c.Log = value
	case "log-format":
		c.LogFormat = value
	case "config", "f":
		if value != "config.json" {
			return fmt.Errorf("option --config %.100q: devices can only be put into config.json", value)
		}
	}
	return nil
}

// The names of runtimes to search for, and the directories after those of PATH, in this order.
var (
	runtimeNames = []string{"runc", "crun"}
	runtimeDirs  = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}
)

// Runtime returns the path of the runtime that the policy names, or else of the engine's default runtime, or of the
// first that is found. Only root may be able to change that runtime, and it must not be this program. If the policy has
// a mistake, commands that create a container fail. Other commands use the valid keys of the policy, so that containers
// can still be stopped.
func (i Injector) Runtime(c Command) (string, error) {
	p, err := readAll(i.PolicyFile)
	if p == nil || err != nil && c.Creates() {
		return "", fmt.Errorf("find the runtime: policy %s: %w", i.PolicyFile, err)
	}
	if filepath.IsAbs(p.Runtime) {
		return p.Runtime, checkRuntime(p.Runtime)
	}
	names := runtimeNames
	standard, err := readEngine(i.EngineFile)
	switch {
	case err != nil:
		return "", fmt.Errorf("find the runtime: %w", err)
	case filepath.IsAbs(standard):
		if err := checkRuntime(standard); err != nil {
			return standard, fmt.Errorf("%w; after a change of the engine's runtime run gpu-cdi-plugin hook install again", err)
		}
		return standard, nil
	case standard != "":
		names = []string{standard}
	}
	path, err := findRuntime(names, filepath.SplitList(os.Getenv("PATH")), runtimeDirs)
	if path == "" {
		err = fmt.Errorf("there is no %s in PATH and %s; name the runtime in %s",
			strings.Join(names, " or "), strings.Join(runtimeDirs, ", "), i.PolicyFile)
	}
	return path, err
}

// readEngine returns the default runtime of the engine, a path or a name, from the file that hook install wrote. It is
// empty without the file.
func readEngine(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	data, err := readTrusted(path)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	runtime, err := EngineRuntime(data)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return runtime, nil
}

// EngineRuntime returns the default runtime in the content of an EngineFile: a path, a name, or "".
func EngineRuntime(data []byte) (string, error) {
	engine := struct {
		Runtime string `yaml:"runtime"`
	}{}
	_, err := yamlfile.Decode(data, &engine, nil)
	if name := engine.Runtime; err == nil && !filepath.IsAbs(name) && strings.Contains(name, "/") {
		err = fmt.Errorf("runtime: %.100q: want an absolute path, or the name of a program", name)
	}
	if err != nil {
		return "", err
	}
	return engine.Runtime, nil
}

// findRuntime returns the first runtime that is not this program, with an error if others can change it. Those in the
// directories of PATH count only if others cannot. If there is none, the path is empty.
func findRuntime(names, pathDirs, dirs []string) (string, error) {
	for _, name := range names {
		for _, dir := range pathDirs {
			if path := filepath.Join(dir, name); filepath.IsAbs(dir) && checkRuntime(path) == nil {
				return path, nil
			}
		}
		for _, dir := range dirs {
			path := filepath.Join(dir, name)
			// If the file is missing, the directory need not be trusted: Debian's group staff can write to
			// /usr/local/sbin.
			if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err := checkRuntime(path); !errors.Is(err, errSelf) {
				return path, err
			}
		}
	}
	return "", nil
}

var errSelf = errors.New("it is this program")

func checkRuntime(path string) error {
	if err := trust.RootFile(path); err != nil {
		return fmt.Errorf("the runtime %s is not run: %w", path, err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return err
	}
	if os.SameFile(info, self) {
		return fmt.Errorf("the runtime %s is not run: %w", path, errSelf)
	}
	return nil
}
