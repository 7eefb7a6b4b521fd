package trace

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// source is one open trace file.
type source struct {
	name string
	file interface {
		io.Reader
		io.ReaderAt
	}
	report *Report
}

// yieldFunc receives one session and the line it ended on, 0 where lines mean
// nothing. Its errors end the reading.
type yieldFunc func(s *Session, line int) error

// Report counts what was read and what was left out.
type Report struct {
	Files      int
	EmptyFiles int
	Sessions   int
	Turns      int
	// SkippedRows are rows that hold no model call, or one that an earlier row
	// held already.
	SkippedRows int
}

// Read reads a file, or all files of the format below a folder in the order of
// their names, and calls yield for every session. An error names the file and
// the place; sessions yielded before it must then be thrown away, as ReadAll
// and Import do.
func Read(format Format, path string, yield func(Session) error) (Report, error) {
	var report Report
	files, err := listFiles(format, path)
	if err != nil {
		return report, err
	}
	seen := map[string]string{}
	for _, name := range files {
		if err := readFile(format, name, &report, checked(name, seen, &report, yield)); err != nil {
			return report, err
		}
	}
	return report, nil
}

// checked stands between a format's reader and the caller: it closes, checks
// and counts each session and refuses one that was seen already, in this file
// or in another (seen holds the file of each id).
func checked(name string, seen map[string]string, report *Report, yield func(Session) error) yieldFunc {
	return func(s *Session, line int) error {
		s.end()
		if err := s.check(); err != nil {
			return sessionFileError(name, line, err)
		}
		if first, twice := seen[s.ID]; twice {
			return fileErrorf(name, line, "", "session %s occurs twice, first in %s", s.ID, first)
		}
		seen[s.ID] = name
		report.Sessions++
		report.Turns += len(s.Turns)
		return yield(*s)
	}
}

// ReadAll reads a file or folder whole: every session, or none and an error.
func ReadAll(format Format, path string) ([]Session, Report, error) {
	var sessions []Session
	report, err := Read(format, path, func(s Session) error {
		sessions = append(sessions, s)
		return nil
	})
	if err != nil {
		return nil, report, err
	}
	return sessions, report, nil
}

// listFiles returns the path itself if it is a file, else the format's files
// below it.
func listFiles(format Format, path string) ([]string, error) {
	entry, ok := formatTable[format]
	if !ok {
		return nil, fmt.Errorf("unknown trace format %s", format)
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("opening trace: %w", err)
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	var files []string
	err = filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(name, entry.ending) {
			files = append(files, name)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing traces: %w", err)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("folder %s holds no file that ends in %s, as %s traces do", path, entry.ending, format)
	}
	return files, nil
}

func readFile(format Format, name string, report *Report, yield yieldFunc) (err error) {
	file, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("opening trace: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("opening trace: %w", err)
	}
	report.Files++
	if info.Size() == 0 {
		report.EmptyFiles++
		return nil
	}
	return formatTable[format].read(&source{name: name, file: file, report: report}, yield)
}
