package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
)

const (
	pluginName = "gpu-cdi-plugin"
	hookName   = "prestart-hook"
	// maxProgram bounds the size of a program, in bytes.
	maxProgram = 256 << 20
	// maxMountinfo bounds the list of mounts, in bytes. A namespace has at most 100,000 mounts by default.
	maxMountinfo = 64 << 20
)

// ownDirs are the directories in which gpu-cdi-plugin keeps its files, by default.
var ownDirs = []string{"/var/lib/gpu-cdi-plugin", "/run/gpu-cdi-plugin"}

// hookRecord exists while engines are configured to run the hook.
const hookRecord = "/var/lib/gpu-cdi-plugin/hook-install.json"

// claimRecords is the directory of the records of prepared ResourceClaims, UID.json.
const claimRecords = "/var/lib/gpu-cdi-plugin/claims"

// launcher has the flags of the command.
type launcher struct {
	host, dir, config string
	force             bool
}

// run installs the programs and becomes gpu-cdi-plugin. It returns only after an error.
func (l *launcher) run(args []string) error {
	own, err := os.Executable() // the other programs of the image are beside it
	if err != nil {
		return fmt.Errorf("find the programs of the image: %w", err)
	}
	files := map[string][]byte{}
	for _, name := range []string{pluginName, hookName} {
		data, err := fileio.ReadFile(filepath.Join(filepath.Dir(own), name), maxProgram)
		if err != nil {
			return fmt.Errorf("read %s of the image: %w", name, err)
		}
		files[name] = data
	}
	args, err = l.withConfig(args)
	if err != nil {
		return err
	}
	if err := l.enterHost(); err != nil {
		return err
	}
	// The hook first: specs that the new plugin writes may need it.
	for _, name := range []string{hookName, pluginName} {
		if err := install(filepath.Join(l.dir, name), files[name]); err != nil {
			return err
		}
	}
	program := filepath.Join(l.dir, pluginName)
	err = unix.Exec(program, append([]string{program}, args...), os.Environ())
	return fmt.Errorf("run %s on the host: %w", program, err)
}

// withConfig adds the option for the configuration in l.config. The directory stays open in gpu-cdi-plugin, which
// cannot see the container's files by their paths. It is opened and not its file, since the kubelet replaces the links
// in the directory of a ConfigMap.
func (l *launcher) withConfig(args []string) ([]string, error) {
	if l.config == "" {
		return args, nil
	}
	fd, err := unix.Open(l.config, unix.O_PATH|unix.O_DIRECTORY, 0) // without O_CLOEXEC
	if err != nil {
		return nil, fmt.Errorf("open the directory of the configuration %s: %w", l.config, err)
	}
	return append(args, "--config=/proc/self/fd/"+strconv.Itoa(fd)+"/config.yaml"), nil
}

// enterHost makes the host's root directory that of this process.
func (l *launcher) enterHost() error {
	if err := unix.Chroot(l.host); err != nil {
		return fmt.Errorf("enter the host's root directory %s: %w", l.host, err)
	}
	if err := os.Chdir("/"); err != nil {
		return fmt.Errorf("enter the host's root directory %s: %w", l.host, err)
	}
	unix.Umask(0o022)
	return nil
}

// install puts a program into a directory that only root can change, unless it is already there.
func install(path string, data []byte) error {
	dir := filepath.Dir(path)
	if err := fileio.MakeDirs(dir); err != nil {
		return fmt.Errorf("install %s on the host: %w", path, err)
	}
	if err := trust.Dir(dir); err != nil {
		return fmt.Errorf("install %s on the host: %w", path, err)
	}
	before, err := fileio.ReadFile(path, maxProgram)
	if err == nil && bytes.Equal(before, data) && trust.RootFile(path) == nil && isProgram(path) {
		return nil
	}
	if err := fileio.Replace(path, data, 0o755); err != nil {
		return fmt.Errorf("install %s on the host: %w", path, err)
	}
	return nil
}

func isProgram(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode() == 0o755
}

// remove removes from the host the programs, and what gpu-cdi-plugin keeps there besides CDI specs and node labels.
func (l *launcher) remove() error {
	if err := l.enterHost(); err != nil {
		return err
	}
	switch _, err := os.Lstat(hookRecord); {
	case err == nil:
		return fmt.Errorf("engines are configured to run %s, as %s says, and some start no containers without it: "+
			`run "launcher run hook uninstall" first`, hookName, hookRecord)
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("find out whether engines are configured to run %s: %w", hookName, err)
	}
	if err := checkClaims(); err != nil && !l.force {
		return err
	}
	var errs []error
	for _, name := range []string{pluginName, hookName} {
		err := fileio.Remove(filepath.Join(l.dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	err := os.Remove(l.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		errs = append(errs, err)
	}
	for _, dir := range ownDirs {
		if err := trust.Dir(dir); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, removeTree(dir))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove the files of %s from the host: %w", pluginName, err)
	}
	return nil
}

// checkClaims returns an error if ResourceClaims are prepared.
func checkClaims() error {
	entries, err := os.ReadDir(claimRecords)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("find out whether ResourceClaims are prepared: %w", err)
	}
	for _, e := range entries {
		if filepath.Ext(e.Name()) == ".json" {
			return fmt.Errorf("a ResourceClaim is prepared, as %s says, and its pod cannot end without %s: end the pod first, "+
				"or remove all the same with --force", filepath.Join(claimRecords, e.Name()), pluginName)
		}
	}
	return nil
}

// removeTree removes a directory, but no file of what is mounted below it: containers may still use the shared memory
// of MPS. It unmounts that in its own mount namespace. In those of the host and of other containers the kernel unmounts
// it when its mount point is removed (mount_namespaces(7)). A directory that is a mount point itself stays, empty.
func removeTree(dir string) error {
	points, err := mountPoints()
	if err != nil {
		return err
	}
	slices.SortFunc(points, func(a, b string) int { return len(b) - len(a) }) // the lower ones first
	for _, point := range points {
		if !strings.HasPrefix(point, dir+"/") {
			continue
		}
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return &os.PathError{Op: "unmount", Path: point, Err: err}
		}
	}
	err = os.RemoveAll(dir)
	if errors.Is(err, unix.EBUSY) && slices.Contains(points, dir) {
		return nil
	}
	return err
}

// mountTmpfs mounts a tmpfs at a directory, unless that is a mount point already. It follows no link: a daemon of MPS
// may be able to write to a directory on the way.
func mountTmpfs(path, options string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	root, err := os.Open("/")
	if err != nil {
		return err
	}
	defer root.Close()
	dir, err := fileio.MakeDirsAt(root, path)
	if err != nil {
		return fmt.Errorf("mount a tmpfs: %w", err)
	}
	defer dir.Close()
	return fileio.MountTmpfs(dir, pluginName, options)
}

// unescape replaces the octal numbers with which the kernel writes some bytes of paths (proc_pid_mountinfo(5)).
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// mountPoints returns the mount points that can be reached from the root directory. The mount IDs of statx(2) would do
// only since Linux 5.8.
func mountPoints() ([]string, error) {
	const path = "/proc/thread-self/mountinfo"
	data, err := fileio.ReadFile(path, maxMountinfo)
	if err != nil {
		return nil, fmt.Errorf("read the mounts: %w", err)
	}
	var points []string
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 5 {
			return nil, fmt.Errorf("%s has an unexpected line: %q", path, line)
		}
		points = append(points, unescape.Replace(fields[4]))
	}
	return points, nil
}
