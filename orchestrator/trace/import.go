package trace

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// ImportConfig says what to import and where to.
type ImportConfig struct {
	// Format and Path name the trace, a file or a folder.
	Format Format
	Path   string
	// Out is the compact trace to write. It is replaced as a whole when
	// everything was read, and untouched otherwise.
	Out string
	// Name, Repository, Commit and Licence go into the header.
	Name       string
	Repository string
	Commit     string
	Licence    string
	// Synthetic says that the source is not a record of real work.
	Synthetic bool
	// MinTurns leaves out shorter sessions; 0 keeps all.
	MinTurns int
}

// ImportReport counts what was read and what of it was written.
type ImportReport struct {
	Report
	SessionsWritten int
	TurnsWritten    int
}

// Import reads a trace and writes the compact trace derived from it.
func Import(cfg ImportConfig) (report ImportReport, err error) {
	header, err := cfg.header()
	if err != nil {
		return report, err
	}
	out, err := os.CreateTemp(filepath.Dir(cfg.Out), ".trace-*")
	if err != nil {
		return report, fmt.Errorf("creating compact trace: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, discard(out))
		}
	}()
	writer, err := newCompactWriter(out, header)
	if err != nil {
		return report, err
	}
	report.Report, err = Read(cfg.Format, cfg.Path, func(s Session) error {
		if len(s.Turns) < cfg.MinTurns {
			return nil
		}
		return writer.add(&s)
	})
	if err != nil {
		return report, err
	}
	report.SessionsWritten, report.TurnsWritten = writer.sessions, writer.turns
	if writer.sessions == 0 {
		return report, fmt.Errorf("importing %s: no session of at least %d turns in %d files (%d of them empty)",
			cfg.Path, max(cfg.MinTurns, 1), report.Files, report.EmptyFiles)
	}
	if err := writer.finish(); err != nil {
		return report, fmt.Errorf("writing compact trace: %w", err)
	}
	return report, publish(out, cfg.Out)
}

func (cfg ImportConfig) header() (Header, error) {
	if _, ok := formatTable[cfg.Format]; !ok || cfg.Format == FormatHoldfast {
		return Header{}, fmt.Errorf("importing: format must be one of a foreign trace, is %s", cfg.Format)
	}
	h := Header{
		Name: cfg.Name, Repository: cfg.Repository, Commit: cfg.Commit, Licence: cfg.Licence,
		Format: cfg.Format.String(), TokenCounts: "recorded", Synthetic: cfg.Synthetic,
	}
	if cfg.Format == FormatLMCache || cfg.Format == FormatTauBench {
		h.TokenCounts = TokenizerName
	}
	if cfg.MinTurns > 1 {
		h.Selection = fmt.Sprintf("sessions of at least %d turns", cfg.MinTurns)
	}
	if err := h.check(cfg.Out, 0); err != nil {
		return Header{}, fmt.Errorf("importing: %w", err)
	}
	return h, nil
}

// publish makes the finished file durable and gives it its name.
func publish(out *os.File, name string) error {
	if err := errors.Join(out.Chmod(0o644), out.Sync(), out.Close()); err != nil {
		return fmt.Errorf("writing compact trace: %w", err)
	}
	if err := os.Rename(out.Name(), name); err != nil {
		return fmt.Errorf("writing compact trace: %w", err)
	}
	return nil
}

// discard removes an unfinished file. Closing it twice is no error here.
func discard(out *os.File) error {
	if err := out.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return os.Remove(out.Name())
}
