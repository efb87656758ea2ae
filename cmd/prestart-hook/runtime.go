package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook/inject"
	"gpu-cdi-plugin/internal/trust"
)

// The runtime must be executed on the main thread: only that thread has the parent-death signal (PR_SET_PDEATHSIG)
// that the caller set.
func init() {
	if isRuntime(os.Args) {
		runtime.LockOSThread()
	}
}

func isRuntime(args []string) bool {
	if len(args) == 0 {
		return false
	}
	name := filepath.Base(args[0])
	return name == runtimeName || strings.HasPrefix(name, runtimeName+"-")
}

// engineFile returns the file beside the policy with the default runtime of the engine by whose link, such as
// gpu-cdi-runtime-crio, this program was run. It is empty for gpu-cdi-runtime.
func engineFile(in inject.Injector, program string) string {
	engine, ok := strings.CutPrefix(filepath.Base(program), runtimeName+"-")
	if !ok {
		return ""
	}
	return filepath.Join(filepath.Dir(in.PolicyFile), "runtime-"+engine+".yaml")
}

// runRuntime adds devices to the bundle if the command creates a container, and then executes the runtime. It returns
// only if there is an error. It changes nothing that the runtime inherits, such as the environment and the umask.
// There is one exception, as in every Go program: ignored signals other than SIGHUP and SIGINT get their default
// action.
func runRuntime(in inject.Injector, args []string, stderr io.Writer) int {
	c, err := inject.ParseCommand(args)
	if err == nil {
		err = becomeRuntime(in, c, args)
	}
	problem := oneLine(err)
	err = fmt.Errorf("%s: %w", runtimeName, problem)
	fmt.Fprintln(stderr, err)
	writeLog(c, err)
	problems := problems{in: in, position: runtimeName, container: c.ID}
	if err := problems.log(inject.Error, problem); err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", runtimeName, err)
	}
	return statusFailure
}

func becomeRuntime(in inject.Injector, c inject.Command, args []string) error {
	path, err := within(time.After(deadline), "put devices into the bundle "+c.Bundle, func() (string, error) {
		path, err := in.Runtime(c)
		if err != nil || !c.Creates() {
			return path, err
		}
		return path, in.Bundle(c.Bundle)
	})
	if err != nil {
		return err
	}
	err = unix.Exec(path, append([]string{path}, args...), os.Environ())
	return fmt.Errorf("run the runtime %s: %w", path, err)
}

// writeLog appends an error to the runtime's log file: containerd and podman show the last line of that file. Errors
// of writeLog are not reported, since the policy's log has the same message.
func writeLog(c inject.Command, problem error) {
	path := strings.TrimPrefix(c.Log, "file:") // crun accepts this prefix, and journald: and syslog:
	if path == "" || strings.HasPrefix(path, "journald:") || strings.HasPrefix(path, "syslog:") {
		return
	}
	now := time.Now().UTC().Format(time.RFC3339)
	line := fmt.Sprintf("time=%q level=error msg=%q\n", now, problem)
	if c.LogFormat == "json" {
		data, _ := json.Marshal(map[string]string{"level": "error", "msg": problem.Error(), "time": now})
		line = string(data) + "\n"
	}
	// The directory may be a user's bundle, in which a link could lead to any file.
	dir, err := trust.OpenDir(filepath.Dir(path))
	if err != nil {
		return
	}
	defer dir.Close()
	const flags = unix.O_WRONLY | unix.O_APPEND | unix.O_CREAT | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	fd, err := unix.Openat(int(dir.Fd()), filepath.Base(path), flags, 0o644)
	if err != nil {
		return
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	var st unix.Stat_t // a hard link could also lead to any file
	if err := unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 1 {
		_, _ = f.WriteString(line)
	}
}
