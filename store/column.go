package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Column is a further array of a sample, such as the experts that a mixture-of-experts
// model routed its tokens to. The store does not look into it.
type Column struct {
	// Name is unique within the sample.
	Name string
	// DType is one of DTypes.
	DType string
	Shape []int64
	// Data is the array in row-major order, little-endian.
	Data []byte
}

// Limits of a sample's columns.
const (
	MaxColumns      = 16
	MaxColumnDims   = 8
	MaxColumnsBytes = 32 << 20
)

// dtypeBytes are the sizes of one element.
var dtypeBytes = map[string]int64{
	"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
	"int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}

// DTypes lists the element types by size.
var DTypes = []string{"bool", "int8", "uint8", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32", "int64", "uint64", "float64"}

// sizeBytes is what dtype and shape say of the data's length.
func (c *Column) sizeBytes() (int64, error) {
	size, known := dtypeBytes[c.DType]
	if !known {
		return 0, &FieldError{Path: "dtype", Problem: fmt.Sprintf("must be one of %v, is %q", DTypes, c.DType)}
	}
	if len(c.Shape) > MaxColumnDims {
		return 0, &FieldError{Path: "shape", Problem: fmt.Sprintf("must have at most %d dimensions, has %d", MaxColumnDims, len(c.Shape))}
	}
	for i, n := range c.Shape {
		if n < 1 || n > MaxColumnsBytes {
			return 0, &FieldError{Path: fmt.Sprintf("shape[%d]", i), Problem: fmt.Sprintf("must be between 1 and %d, is %d", MaxColumnsBytes, n)}
		}
		if size *= n; size > MaxColumnsBytes {
			return 0, &FieldError{Path: "shape", Problem: fmt.Sprintf("needs more than the %d bytes that a sample's columns may have", MaxColumnsBytes)}
		}
	}
	return size, nil
}

func (c *Column) check() error {
	if !classPattern.MatchString(c.Name) {
		return &FieldError{Path: "name", Problem: fmt.Sprintf("must be 1 to 64 letters, digits, dots, dashes or underscores, is %q", c.Name)}
	}
	size, err := c.sizeBytes()
	if err == nil && int64(len(c.Data)) != size {
		err = &FieldError{Path: "data", Problem: fmt.Sprintf("must be the %d bytes of %v %s, is %d", size, c.Shape, c.DType, len(c.Data))}
	}
	return err
}

// Blobs keeps the bytes of columns where Postgres does not. Keys are slash-separated
// letters, digits and dashes. The checksum is in Postgres.
type Blobs interface {
	// Put is durable when it returns; the same key always has the same data.
	Put(ctx context.Context, key string, data []byte) error
	Get(ctx context.Context, key string) ([]byte, error)
	// Delete of what is not there is no error.
	Delete(ctx context.Context, key string) error
}

func blobKey(session uuid.UUID, sum []byte) string {
	return session.String() + "/" + hex.EncodeToString(sum)
}

const (
	lockColumnsSQL = `
select ` + liveCondition + ` from sessions where session_id = $1 for no key update`

	selectColumnsHeldSQL = `select name, size_bytes, sha256, data is null from sample_columns where session_id = $1`

	putColumnSQL = `
insert into sample_columns (session_id, ordinal, name, dtype, shape, size_bytes, sha256, data)
select $1, (select coalesce(max(ordinal) + 1, 0) from sample_columns where session_id = $1), $2, $3, $4, $5, $6, $7
on conflict (session_id, name) do update set dtype = excluded.dtype, shape = excluded.shape, size_bytes = excluded.size_bytes, sha256 = excluded.sha256, data = excluded.data`

	selectColumnsSQL = `
select session_id, name, dtype, shape, size_bytes, sha256, data from sample_columns where session_id = any($1) order by session_id, ordinal`

	selectBlobsSQL = `select session_id, sha256 from sample_columns where session_id = any($1) and data is null`
)

// heldColumn is what a session has already.
type heldColumn struct {
	name    string
	size    int64
	sum     []byte
	outside bool
}

// PutColumns adds columns to the sample that a session is to become, or replaces those
// of the same names. Errors: *FieldError below columns, ErrSessionEnded once the sample
// is made, ErrNotFound.
func (s *Store) PutColumns(ctx context.Context, sessionID uuid.UUID, columns []Column) error {
	if err := checkColumns(columns); err != nil {
		return err
	}
	var replaced []heldColumn
	err := s.write(ctx, func(tx pgx.Tx) error {
		var live bool
		if err := tx.QueryRow(ctx, lockColumnsSQL, sessionID).Scan(&live); err != nil {
			return err
		}
		if !live {
			return ErrSessionEnded
		}
		held, err := readHeldColumns(ctx, tx, sessionID)
		if err != nil {
			return err
		}
		if replaced, err = admitColumns(held, columns); err != nil {
			return err
		}
		for i := range columns {
			if err := s.putColumn(ctx, tx, sessionID, &columns[i]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return found(err, "adding columns to the sample of session", sessionID)
	}
	s.dropBlobs(ctx, sessionID, replaced)
	return nil
}

// dropBlobs removes what a session has kept outside of Postgres and does not need any
// more, once that is committed. Meanwhile the same bytes may have been given again: so
// it looks under the lock that PutColumns has. What a failure leaves stays.
func (s *Store) dropBlobs(ctx context.Context, sessionID uuid.UUID, left []heldColumn) {
	left = slices.DeleteFunc(left, func(h heldColumn) bool { return !h.outside })
	if len(left) == 0 || s.blobs == nil {
		return
	}
	err := s.write(ctx, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, lockColumnsSQL, sessionID).Scan(new(bool)); err != nil {
			return err
		}
		held, err := readHeldColumns(ctx, tx, sessionID)
		if err != nil {
			return err
		}
		for _, l := range left {
			if slices.ContainsFunc(held, func(h heldColumn) bool { return h.outside && bytes.Equal(h.sum, l.sum) }) {
				continue
			}
			if err := s.blobs.Delete(ctx, blobKey(sessionID, l.sum)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		s.log.Warn("removing columns that are not needed any more", "session", sessionID, "error", err)
	}
}

func checkColumns(columns []Column) error {
	names := map[string]int{}
	for i := range columns {
		path := fmt.Sprintf("columns[%d]", i)
		if err := columns[i].check(); err != nil {
			var field *FieldError
			if errors.As(err, &field) {
				return &FieldError{Path: path + "." + field.Path, Problem: field.Problem}
			}
			return err
		}
		if first, again := names[columns[i].Name]; again {
			return &FieldError{Path: path + ".name", Problem: fmt.Sprintf("repeats %q of columns[%d]", columns[i].Name, first)}
		}
		names[columns[i].Name] = i
	}
	return nil
}

func readHeldColumns(ctx context.Context, tx pgx.Tx, sessionID uuid.UUID) ([]heldColumn, error) {
	rows, err := tx.Query(ctx, selectColumnsHeldSQL, sessionID)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (h heldColumn, err error) {
		err = row.Scan(&h.name, &h.size, &h.sum, &h.outside)
		return h, err
	})
}

// admitColumns checks the limits of a sample and returns those that the columns replace.
func admitColumns(held []heldColumn, columns []Column) (replaced []heldColumn, err error) {
	count, sizeBytes := len(columns), int64(0)
	for i := range columns {
		sizeBytes += int64(len(columns[i].Data))
	}
	for _, h := range held {
		if slices.ContainsFunc(columns, func(c Column) bool { return c.Name == h.name }) {
			replaced = append(replaced, h)
			continue
		}
		count, sizeBytes = count+1, sizeBytes+h.size
	}
	switch {
	case count > MaxColumns:
		return nil, &FieldError{Path: "columns", Problem: fmt.Sprintf("must be at most %d for a sample, would be %d", MaxColumns, count)}
	case sizeBytes > MaxColumnsBytes:
		return nil, &FieldError{Path: "columns", Problem: fmt.Sprintf("must have at most %d bytes for a sample, would have %d", MaxColumnsBytes, sizeBytes)}
	}
	return replaced, nil
}

func (s *Store) putColumn(ctx context.Context, tx pgx.Tx, sessionID uuid.UUID, c *Column) error {
	sum := sha256.Sum256(c.Data)
	data := c.Data
	if data == nil {
		data = []byte{}
	}
	if s.blobs != nil {
		// A blob without a row is overwritten by a repetition, a row without a blob is not delivered.
		if err := s.blobs.Put(ctx, blobKey(sessionID, sum[:]), c.Data); err != nil {
			return fmt.Errorf("keeping column %s: %w", c.Name, err)
		}
		data = nil
	}
	shape := c.Shape
	if shape == nil {
		shape = []int64{}
	}
	_, err := tx.Exec(ctx, putColumnSQL, sessionID, c.Name, c.DType, shape, int64(len(c.Data)), sum[:], data)
	return err
}

// loadColumns fills the samples' columns. One whose bytes are not those that were given
// is not delivered.
func (s *Store) loadColumns(ctx context.Context, tx pgx.Tx, samples []Sample) error {
	bySession := make(map[uuid.UUID]*Sample, len(samples))
	var ids []uuid.UUID
	for i := range samples {
		if samples[i].ColumnBytes > 0 {
			ids = append(ids, samples[i].SessionID)
			bySession[samples[i].SessionID] = &samples[i]
		}
	}
	if len(ids) == 0 {
		return nil
	}
	rows, err := tx.Query(ctx, selectColumnsSQL, ids)
	if err != nil {
		return err
	}
	var id uuid.UUID
	var c Column
	var size int64
	var sum []byte
	_, err = pgx.ForEachRow(rows, []any{&id, &c.Name, &c.DType, &c.Shape, &size, &sum, &c.Data}, func() error {
		column := c
		c.Shape, c.Data = nil, nil
		if err := s.completeColumn(ctx, id, &column, sum); err != nil {
			return fmt.Errorf("column %s of the sample of session %s: %w", column.Name, id, err)
		}
		bySession[id].Columns = append(bySession[id].Columns, column)
		return nil
	})
	return err
}

func (s *Store) completeColumn(ctx context.Context, sessionID uuid.UUID, c *Column, sum []byte) (err error) {
	if c.Data == nil {
		if s.blobs == nil {
			return errors.New("is kept outside of Postgres, and no place for that is configured")
		}
		if c.Data, err = s.blobs.Get(ctx, blobKey(sessionID, sum)); err != nil {
			return err
		}
	}
	if got := sha256.Sum256(c.Data); string(got[:]) != string(sum) {
		return errors.New("has another checksum than when it was given")
	}
	return c.check()
}

// deleteBlobs removes what pruned sessions keep outside of Postgres, before their rows
// go: what a failure leaves is found again.
func (s *Store) deleteBlobs(ctx context.Context, tx pgx.Tx, ids []uuid.UUID) error {
	rows, err := tx.Query(ctx, selectBlobsSQL, ids)
	if err != nil {
		return err
	}
	var keys []string
	var id uuid.UUID
	var sum []byte
	if _, err := pgx.ForEachRow(rows, []any{&id, &sum}, func() error {
		keys = append(keys, blobKey(id, sum))
		return nil
	}); err != nil || len(keys) == 0 {
		return err
	}
	if s.blobs == nil {
		return errors.New("columns are kept outside of Postgres, and no place for that is configured")
	}
	for _, key := range keys {
		if err := s.blobs.Delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}
