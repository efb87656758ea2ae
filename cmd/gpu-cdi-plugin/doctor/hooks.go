package doctor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"

	"gpu-cdi-plugin/hook/install"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
)

// hookFacts are the OCI hooks that podman and CRI-O add to containers, and our own hook.
type hookFacts struct {
	documents []hookDocument
	// own is our hook, by --hook-path or beside this program. Without a path there is none.
	own  hookProgram
	noEx bool // it is on a file system that executes nothing
}

// hookDocument is a file of a directory of hooks.
type hookDocument struct {
	file string
	hook hookProgram
	err  error // of reading the file
}

// hookProgram is a program that engines run as root.
type hookProgram struct {
	path, at   string // at is the path in this process
	missing    error  // of finding it
	executable bool
	unsafe     error // others can change it
}

func (f *facts) readHooks() {
	h := &f.hooks
	for _, dir := range f.hookDirs() {
		for _, name := range f.names(dir) {
			if path.Ext(name) == ".json" {
				if d, ok := f.readHook(path.Join(dir, name)); ok {
					h.documents = append(h.documents, d)
				}
			}
		}
	}
	if f.NoHook != nil {
		f.unread("prestart-hook", f.NoHook)
	}
	if f.Hook == "" {
		return
	}
	h.own = f.readProgram(f.Hook)
	h.noEx = mountOf(f.Hook, "").noExec
}

// hookDirs returns the directories of hooks that podman and CRI-O read, each once.
func (f *facts) hookDirs() []string {
	var dirs []string
	for _, e := range f.engines.list {
		if e.settings == nil || e.name != "podman" && e.name != "crio" {
			continue
		}
		list := e.settings.HookDirs
		if list == nil {
			list = install.HookDirs()
		}
		for _, dir := range list {
			if path.IsAbs(dir) && !slices.Contains(dirs, dir) {
				dirs = append(dirs, dir)
			}
		}
	}
	return dirs
}

// readHook reads a document of a hook and checks its program. ok is false if the file is gone.
func (f *facts) readHook(file string) (d hookDocument, ok bool) {
	d.file = file
	data := f.read(file)
	if data == nil {
		return d, false
	}
	var name string
	if name, d.err = programOf(data); d.err == nil {
		d.hook = f.readProgram(name)
	}
	return d, true
}

// programOf returns the program of a document of a hook, of version 1.0.0 or 0.1.0.
func programOf(data []byte) (string, error) {
	var document struct{ Hook json.RawMessage }
	if err := json.Unmarshal(data, &document); err != nil {
		return "", err
	}
	var old string
	if json.Unmarshal(document.Hook, &old) == nil && old != "" {
		return old, nil
	}
	var hook struct{ Path string }
	if err := json.Unmarshal(document.Hook, &hook); err != nil || hook.Path == "" {
		return "", errors.Join(errors.New("it names no program (hook.path)"), err)
	}
	return hook.Path, nil
}

// readProgram returns what is known of a program of the host. Our own hook is not below the host's root.
func (f *facts) readProgram(name string) hookProgram {
	p := hookProgram{path: name, at: f.onHost(name)}
	at := f.at(name)
	if name == f.Hook || path.Dir(name) == path.Dir(f.Hook) {
		at, p.at = name, name
	}
	info, err := os.Stat(at)
	if err != nil {
		p.missing = err
		return p
	}
	p.executable = info.Mode().IsRegular() && info.Mode()&0o111 != 0
	if err := f.TrustedHook(at); errors.Is(err, trust.ErrUnsafe) {
		p.unsafe = err
	}
	return p
}

// hooksOfNVIDIA are the programs of NVIDIA that read NVIDIA_VISIBLE_DEVICES from the environment of a container.
var hooksOfNVIDIA = []string{"nvidia-container-runtime-hook", "nvidia-container-toolkit"}

func checkHooks(f *facts) []Finding {
	var list []Finding
	for _, d := range f.hooks.documents {
		switch {
		case d.err != nil:
			finding := newFinding("hook-file", d.file, "it cannot be used: "+wording.OneLine(d.err))
			list = append(list, finding.fixed("rm "+wording.Quote(f.onHost(d.file))))
			continue
		case slices.Contains(hooksOfNVIDIA, path.Base(d.hook.path)) && !f.engines.ignoresImages:
			finding := newFinding("hook-nvidia", d.file, "it runs "+d.hook.path)
			list = append(list, finding.fixed("rm "+wording.Quote(f.onHost(d.file))))
		}
		switch p := d.hook; {
		case p.missing != nil && errors.Is(p.missing, fs.ErrNotExist):
			problem := fmt.Sprintf("its program %s does not exist", p.path)
			list = append(list, newFinding("hook-program", d.file, problem).fixed(f.removal(d)))
		case p.missing != nil:
			list = append(list, newFinding("unchecked", d.file, wording.OneLine(p.missing)))
		case !p.executable:
			list = append(list, newFinding("hook-program", d.file, p.path+" is not executable").fixed(
				"chmod 755 "+wording.Quote(p.at)))
		case p.unsafe != nil:
			list = append(list, newFinding("hook-unsafe", p.path, wording.OneLine(p.unsafe)).fixed(p.protection()))
		}
	}
	return append(list, f.hooks.checkOwn()...)
}

// protection returns the command that keeps others from changing the program itself.
func (p hookProgram) protection() string {
	at := wording.Quote(p.at)
	return "chown root:root " + at + " && chmod go-w " + at
}

// removal returns the command that removes a document whose program is gone.
func (f *facts) removal(d hookDocument) string {
	files, err := install.Read(f.Host.Root(), nil, "")
	if err == nil {
		installed, _ := files.Installed() // Read has read the record
		for _, engine := range installed {
			if slices.Contains(install.HookDocuments(engine), d.file) {
				return "gpu-cdi-plugin hook uninstall " + engine
			}
		}
	}
	return "rm " + wording.Quote(f.onHost(d.file))
}

// checkOwn checks our own hook, which specs name.
func (h *hookFacts) checkOwn() []Finding {
	p := h.own
	switch {
	case p.path == "":
		return nil
	case p.missing != nil:
		return []Finding{newFinding("hook-missing", p.path, wording.OneLine(p.missing))}
	case !p.executable:
		return []Finding{newFinding("hook-missing", p.path, "it is not executable").fixed("chmod 755 " + wording.Quote(p.at))}
	case p.unsafe != nil:
		return []Finding{newFinding("hook-unsafe", p.path, wording.OneLine(p.unsafe)).fixed(p.protection())}
	case h.noEx:
		return []Finding{newFinding("hook-noexec", p.path, "its file system is mounted with noexec")}
	}
	return nil
}
