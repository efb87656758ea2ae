package elffile

import (
	"debug/elf"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// BenchmarkSONAME measures opening a library and reading its SONAME, beside debug/elf.
func BenchmarkSONAME(b *testing.B) {
	library := filepath.Join(b.TempDir(), "libcuda.so.1")
	testenv.Must(b, (sim.Library{SONAME: "libcuda.so.1"}).WriteELF(library))
	files := map[string]string{"a simulated library": library}
	for _, libc := range []string{
		"/lib/x86_64-linux-gnu/libc.so.6", "/lib/aarch64-linux-gnu/libc.so.6", "/lib64/libc.so.6",
	} {
		if _, err := os.Stat(libc); err == nil {
			files["libc"] = libc
		}
	}
	for name, file := range files {
		for reader, read := range map[string]func(*os.File) (string, error){
			"elffile": readSONAME, "debug elf": readSONAMEByDebugELF,
		} {
			b.Run(name+"/"+reader, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					f, err := os.Open(file)
					testenv.Must(b, err)
					if soname, err := read(f); err != nil || soname == "" {
						b.Fatalf("%q, %v", soname, err)
					}
					_ = f.Close()
				}
			})
		}
	}
}

func readSONAME(r *os.File) (string, error) {
	info, err := r.Stat()
	if err != nil {
		return "", err
	}
	f, err := ReadLibrary(r, info.Size(), MachineOf(runtime.GOARCH))
	if err != nil {
		return "", err
	}
	return f.SONAME()
}

func readSONAMEByDebugELF(r *os.File) (string, error) {
	f, err := elf.NewFile(r)
	if err != nil {
		return "", err
	}
	names, err := f.DynString(elf.DT_SONAME)
	return append(names, "")[0], err
}
