package doctor

import (
	"errors"
	"path"
	"strings"

	"gpu-cdi-plugin/hook/inject"
	"gpu-cdi-plugin/hook/install"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
)

// ownFacts are the files of this product that its programs read.
type ownFacts struct {
	// policy is hook.yaml, and runtimes are the files with the engines' default runtimes. Only root may be able to change
	// them.
	policy   runtimeFile
	runtimes []runtimeFile
}

// runtimeFile is a file that names the runtime behind gpu-cdi-runtime.
type runtimeFile struct {
	path    string
	program string
	err     error // why gpu-cdi-runtime refuses the file, or nil
}

// ownDir is the directory of this product's configuration.
const ownDir = "/etc/gpu-cdi-plugin"

func (f *facts) readOwn() {
	f.own.policy = f.readRuntimeFile(path.Join(ownDir, "hook.yaml"), inject.PolicyRuntime)
	for _, name := range f.names(ownDir) {
		if strings.HasPrefix(name, "runtime-") && path.Ext(name) == ".yaml" {
			f.own.runtimes = append(f.own.runtimes, f.readRuntimeFile(path.Join(ownDir, name), inject.EngineRuntime))
		}
	}
}

func (f *facts) readRuntimeFile(name string, parse func([]byte) (string, error)) runtimeFile {
	file := runtimeFile{path: name}
	data := f.read(name)
	if data == nil {
		return file
	}
	file.program, file.err = parse(data)
	if err := f.TrustedHook(f.at(name)); errors.Is(err, trust.ErrUnsafe) {
		file.err = err
	}
	return file
}

func checkOwn(f *facts) []Finding {
	return f.checkRuntimeFiles()
}

// checkRuntimeFiles checks what gpu-cdi-runtime reads.
func (f *facts) checkRuntimeFiles() []Finding {
	var list []Finding
	for _, file := range append([]runtimeFile{f.own.policy}, f.own.runtimes...) {
		engine, isEngine := strings.CutPrefix(strings.TrimSuffix(path.Base(file.path), ".yaml"), "runtime-")
		again := "rm " + wording.Quote(f.onHost(file.path)) + " && gpu-cdi-plugin hook install " + wording.Quote(engine)
		switch {
		case file.err != nil && isEngine:
			list = append(list, newFinding("hook-config", file.path, wording.OneLine(file.err)).fixed(again))
		case file.err != nil:
			list = append(list, newFinding("hook-config", file.path, wording.OneLine(file.err)))
		case install.IsRuntimeOfNVIDIA(f.Host.Root(), file.program) && isEngine:
			list = append(list, newFinding("runtime-behind", file.path, "it names "+file.program).fixed(again))
		case install.IsRuntimeOfNVIDIA(f.Host.Root(), file.program):
			list = append(list, newFinding("runtime-behind", file.path, "it names "+file.program).fixed(
				"remove runtime: from "+file.path+", or name runc or crun there"))
		}
	}
	return list
}
