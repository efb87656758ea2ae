package rootfs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"gpu-cdi-plugin/sim"
)

// many adds libraries without code to an image. ldconfig makes a link for each by its name, and puts it into the cache.
func many(ctx context.Context, dir string) error {
	if err := glibc(ctx, dir, false); err != nil {
		return err
	}
	libs := filepath.Join(dir, "usr/lib", machine()+"-linux-gnu")
	if err := os.MkdirAll(libs, 0o755); err != nil {
		return err
	}
	for i := range ManyLibraries {
		l := sim.Library{SONAME: fmt.Sprintf("libmany-%d.so.1", i)}
		if err := l.WriteELF(filepath.Join(libs, fmt.Sprintf("libmany-%d.so.1.%d.0", i, i%7))); err != nil {
			return err
		}
	}
	return Ldconfig(ctx, dir)
}
